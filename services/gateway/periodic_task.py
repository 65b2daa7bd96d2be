"""A task that a process repeats beside its requests. Does not know what the work is.

Work handles the errors that it expects. One that it does not expect is logged with its traceback and counted, and the task goes on at its next period: a file
that is followed, or a ranking that is kept fresh, must not stand still until a restart because of one bad input.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import cache

import structlog
from prometheus_client import REGISTRY

from services.observability.metrics import BackgroundMetrics

log = structlog.get_logger()


class PeriodicTask:
    """Runs `work` every `every_s` seconds, first after one pause or `at_once`. `name` is what log and metric call it."""

    def __init__(
        self, name: str, work: Callable[[], Awaitable[None]], every_s: float, *, at_once: bool = False
    ) -> None:
        self._name = name
        self._work = work
        self._every_s = every_s
        self._at_once = at_once
        self._task: asyncio.Task[None] | None = None
        self._failed_with: str | None = None

    def start(self) -> None:
        """Start. Call in the serving loop."""
        background_metrics().failures.labels(self._name).inc(0)  # else its first increase is unseen
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop, in the middle of the work if need be."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        if not self._at_once:
            await asyncio.sleep(self._every_s)
        while True:
            try:
                await self._work()
            except Exception as error:  # noqa: BLE001 - whatever it is, the next period may succeed
                self._failed(error)
            else:
                self._failed_with = None
            await asyncio.sleep(self._every_s)

    def _failed(self, error: Exception) -> None:
        """Count each failure; log the first of equal ones in a row, since a period may be a fifth of a second."""
        background_metrics().failures.labels(self._name).inc()
        if repr(error) != self._failed_with:
            self._failed_with = repr(error)
            log.error("background_task_failed", task=self._name, again_in_s=self._every_s, exc_info=error)


@cache
def background_metrics() -> BackgroundMetrics:
    """Return the metrics of this process's periodic tasks, made when they are first needed."""
    return BackgroundMetrics(REGISTRY)
