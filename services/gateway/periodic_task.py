"""A background task that a process repeats. Knows nothing about the work itself.

The work handles the errors it expects. An unexpected error is logged with its traceback and counted, and the task
retries after the next period: one bad input must not stop a followed file or a refreshed ranking until the next
restart.
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
    """Runs `work` every `every_s` seconds, first after one period or `at_once`. `name` labels its logs and metrics.

    With `when`, a period begins as soon as this event is set. The task clears it before the work.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], Awaitable[None]],
        every_s: float,
        *,
        at_once: bool = False,
        when: asyncio.Event | None = None,
    ) -> None:
        self._name = name
        self._work = work
        self._every_s = every_s
        self._at_once = at_once
        self._when = when
        self._task: asyncio.Task[None] | None = None
        self._failed_with: str | None = None

    def start(self) -> None:
        """Start. Call in the serving loop."""
        background_metrics().failures.labels(self._name).inc(0)  # otherwise rate() misses the first increase
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop, cancelling the work if it is running."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        if not self._at_once:
            await self._period()
        while True:
            try:
                await self._work()
            except Exception as error:  # noqa: BLE001 - the next period may succeed
                self._failed(error)
            else:
                self._failed_with = None
            await self._period()

    async def _period(self) -> None:
        if self._when is not None:
            await self._when.wait()
        await asyncio.sleep(self._every_s)
        if self._when is not None:
            self._when.clear()

    def _failed(self, error: Exception) -> None:
        """Count each failure; log only the first of equal consecutive errors, since a period may be 0.2 s."""
        background_metrics().failures.labels(self._name).inc()
        if repr(error) != self._failed_with:
            self._failed_with = repr(error)
            log.error("background_task_failed", task=self._name, again_in_s=self._every_s, exc_info=error)


@cache
def background_metrics() -> BackgroundMetrics:
    """Return the metrics of this process's periodic tasks, created on first use."""
    return BackgroundMetrics(REGISTRY)
