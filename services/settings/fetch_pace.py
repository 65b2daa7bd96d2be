"""How long the broker may hold a fetch that has no records: short while records arrive, longer on a quiet topic.

Kafka answers a waiting fetch as soon as a record arrives. The embedded broker answers after the full wait, so half of
the wait is added to a record's latency. Each fetch costs processor time on both sides, also without records.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_QUIET_AFTER_S = 3.0
"""Longer than the pauses in a steady trickle of events, whose latency then stays that of the short wait."""


@dataclass(frozen=True, slots=True)
class FetchWaits:
    """The two waits of a topic's fetches, in milliseconds."""

    busy_ms: int
    quiet_ms: int


class FetchPace:
    """Sets the wait of a consumer's next fetch. Used from the consumer's thread."""

    def __init__(self, consumer: Any, waits: FetchWaits, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = consumer._fetcher.config
        self._waits = waits
        self._clock = clock
        self._quiet_from_s = clock() + _QUIET_AFTER_S

    def polled(self, *, has_records: bool) -> None:
        """Note whether a poll returned records; the next fetch follows."""
        now_s = self._clock()
        if has_records:
            self._quiet_from_s = now_s + _QUIET_AFTER_S
        is_quiet = now_s >= self._quiet_from_s
        self._config["fetch_max_wait_ms"] = self._waits.quiet_ms if is_quiet else self._waits.busy_ms
