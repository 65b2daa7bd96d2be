"""How a consumer waits for records: in the broker, or for a producer's touch (`services.settings.arrivals`).

Kafka holds a fetch until a record arrives. The embedded broker holds it for the full wait, so half of the wait is added
to a record's latency; there a consumer waits for a touch and then fetches at once. Each fetch costs processor time on
both sides, also without records: fetches are rarer on a quiet topic. A fetch at once is held for as long as the broker
takes to look at its partitions, which grows with the topic: the embedded broker (Tansu, `dynostore.rs: fetch`) lists
all batches of a partition with a new batch, and returns no record of a partition that it has not read within the wait.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kafka.util import Timer

from services.settings.arrivals import ArrivalWatch

_QUIET_AFTER_S = 3.0
"""Longer than the pauses in a steady trickle of events, whose latency then stays that of the short wait."""
_MIN_HOLD_MS, _MAX_HOLD_MS = 1.0, 64.0
_HOLD_DECAY = 0.99
_ANSWER_MS = 100
_UNTOUCHED_FACTOR = 4
_EXPLAINED_S = 0.2
"""A producer touches the file at most this long before or after a reader sees its record."""
_OTHERS_FOR_S = 600.0
"""How long after a record without a touch readers still expect such records."""
_PAUSE_FACTOR = 3
"""With touches, a fetch begins this multiple of the last fetch's and its records' time after that fetch began."""


@dataclass(frozen=True, slots=True)
class FetchWaits:
    """The waits of a topic's fetches, in milliseconds.

    `busy_ms`, and `quiet_ms` on a quiet topic, are how long the broker holds a fetch. With touches, `busy_ms` bounds
    the pause after a fetch, and `untouched_ms` is the longest time between two fetches on a quiet topic. After a record
    of a producer that touches no file, fetches are as frequent as without touches.
    """

    busy_ms: int
    quiet_ms: int
    untouched_ms: int


class FetchPace:
    """Times a consumer's fetches. Used from the consumer's thread."""

    def __init__(
        self,
        consumer: Any,
        waits: FetchWaits,
        arrivals: ArrivalWatch | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._consumer = consumer
        self._config = consumer._fetcher.config
        self._waits = waits
        self._arrivals = arrivals
        self._clock = clock
        self._quiet_from_s = clock() + _QUIET_AFTER_S
        self._began_s = clock()
        self._touched_s = clock()
        self._unexplained_s: float | None = None
        self._others_until_s = 0.0
        self._is_drained = False
        self._hold_ms = _MIN_HOLD_MS
        self.is_vain = False
        """Whether the last poll was due to a touch and returned no record: the topic may be another topic by now."""

    def poll(self, wait_ms: int, *, is_urgent: bool = False) -> Mapping[Any, Any]:
        """Return the next records by partition; empty without a record during the wait.

        The wait is `wait_ms`, or with touches the pace's own. `is_urgent`: a caller waits for the topic's end.
        """
        if is_urgent:
            self._quiet_from_s, self._is_drained = self._clock() + _QUIET_AFTER_S, False
        if self._arrivals is None:
            self._config["fetch_max_wait_ms"] = self._waits.quiet_ms if self._is_quiet else self._waits.busy_ms
            fetched: Mapping[Any, Any] = self._consumer.poll(wait_ms)
        else:
            is_touched = self._await_touch(self._arrivals)
            fetched = self._fetch_at_once()
            self.is_vain = is_touched and self._is_drained
            self._look_for_others(bool(fetched))
        if fetched:
            self._quiet_from_s = self._clock() + _QUIET_AFTER_S
        return fetched

    def close(self) -> None:
        if self._arrivals is not None:
            self._arrivals.close()

    @property
    def _is_quiet(self) -> bool:
        return self._clock() >= self._quiet_from_s

    @property
    def _is_in_flight(self) -> bool:
        return bool(self._consumer._fetcher._nodes_with_pending_fetch_requests)

    def _await_touch(self, arrivals: ArrivalWatch) -> bool:
        """Wait until a fetch is due; return whether it is because of a touch.

        After records it is due in any case: they may be the answer to an earlier fetch than the touch. A touch is only
        used up before a fetch that begins after it.
        """
        busy_s = self._waits.busy_ms / 1_000
        pause_s = min(busy_s, _PAUSE_FACTOR * (self._clock() - self._began_s))
        is_touched = self._is_drained and self._is_touched(arrivals, self._longest_s)
        if (is_touched or not self._is_drained) and (early_s := self._began_s + pause_s - self._clock()) > 0:
            time.sleep(early_s)
        if not self._is_in_flight:
            self._is_touched(arrivals, 0)
        return is_touched

    @property
    def _longest_s(self) -> float:
        """The longest time until the next fetch of a drained consumer."""
        waits = self._waits
        if self._clock() < self._others_until_s:
            return (waits.quiet_ms if self._is_quiet else waits.busy_ms) / 1_000
        return (waits.untouched_ms if self._is_quiet else _UNTOUCHED_FACTOR * waits.busy_ms) / 1_000

    def _is_touched(self, arrivals: ArrivalWatch, timeout_s: float) -> bool:
        """Return whether the file was touched, after at most `timeout_s`, and record when."""
        if not arrivals.wait(timeout_s):
            return False
        self._touched_s, self._unexplained_s = self._clock(), None
        return True

    def _look_for_others(self, has_records: bool) -> None:
        """Expect records of producers that touch no file once a record came without a touch around it."""
        now_s = self._clock()
        if self._unexplained_s is not None and now_s - self._unexplained_s > _EXPLAINED_S:
            self._others_until_s, self._unexplained_s = now_s + _OTHERS_FOR_S, None
        if has_records and self._unexplained_s is None and now_s - self._touched_s > _EXPLAINED_S:
            self._unexplained_s = now_s

    def _fetch_at_once(self) -> Mapping[Any, Any]:
        """Return what the broker has now. Uses private parts of the consumer, read in kafka-python 3.0.12."""
        self._config["fetch_max_wait_ms"] = round(self._hold_ms)
        consumer, self._began_s = self._consumer, self._clock()
        fetched: Mapping[Any, Any] = consumer._poll_once(Timer(_ANSWER_MS), consumer.config["max_poll_records"])
        is_answered = not fetched and not self._is_in_flight
        is_cut_short = is_answered and self._is_behind
        self._hold_ms = min(2 * self._hold_ms, _MAX_HOLD_MS) if is_cut_short else self._hold_ms
        if fetched:
            self._hold_ms = max(_HOLD_DECAY * self._hold_ms, _MIN_HOLD_MS)
        self._is_drained = is_answered and not is_cut_short
        return fetched

    @property
    def _is_behind(self) -> bool:
        """Whether the broker reported records that it has not returned."""
        states = self._consumer._subscription.assignment.values()
        return any(state.position and (state.highwater or 0) > state.position.offset for state in states)
