"""Samples the node's metrics in the background: each second while somebody looks at the console, now and then otherwise.

Reading costs a few milliseconds of a thread, so nothing is read on the request path, and little when nobody looks.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

import structlog

from services.gateway.console.counts import Kept, counts_of
from services.gateway.console.ring import Ring
from services.gateway.request.repeating import Repeating

log = structlog.get_logger()

FINE_S = 180.0
KEEP_S = 3_600.0
WATCHED_EVERY_S = 1.0
IDLE_EVERY_S = 20.0
_LOOKING_FOR_S = 10.0
_TICK_S = 0.25


class Watch:
    """Owns the ring and the task that fills it. `scrape` gives the node's metric families and may block."""

    def __init__(
        self, scrape: Callable[[], Iterable[Any]], kept: Kept, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.ring = Ring(FINE_S, KEEP_S, IDLE_EVERY_S)
        self._scrape = scrape
        self._kept = kept
        self._clock = clock
        self._looked_s = float("-inf")
        self._sampled_s = float("-inf")
        self._sampling = Repeating(self._sample_if_due, _TICK_S, at_once=True)

    def look(self) -> Ring:
        """Return the samples, and remember that somebody looks."""
        self._looked_s = self._clock()
        return self.ring

    async def start(self) -> None:
        """Sample from now on."""
        self._sampling.start()

    async def stop(self) -> None:
        """Stop sampling."""
        await self._sampling.stop()

    async def sample(self) -> None:
        """Take one sample. A folder that cannot be read now, a file without a header yet included, costs this sample only."""
        self._sampled_s = self._clock()
        try:
            families = await asyncio.to_thread(lambda: list(self._scrape()))
        except Exception as error:  # noqa: BLE001 - whatever a scrape breaks at, the next one may not
            log.warning("metrics_not_sampled", error=repr(error))
            return
        self.ring.add(counts_of(families, self._kept, self._sampled_s))

    async def _sample_if_due(self) -> None:
        if self._is_due():
            await self.sample()

    def _is_due(self) -> bool:
        now_s = self._clock()
        every_s = WATCHED_EVERY_S if now_s - self._looked_s < _LOOKING_FOR_S else IDLE_EVERY_S
        return now_s - self._sampled_s >= every_s
