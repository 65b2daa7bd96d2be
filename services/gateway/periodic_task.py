"""A task that a process repeats beside its requests. Does not know what the work is."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress


class PeriodicTask:
    """Runs `work` every `every_s` seconds, first after one pause or `at_once`. An error that it raises ends the task."""

    def __init__(self, work: Callable[[], Awaitable[None]], every_s: float, *, at_once: bool = False) -> None:
        self._work = work
        self._every_s = every_s
        self._at_once = at_once
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start. Call in the serving loop."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop, in the middle of the work if need be. Raises the error that ended the task before, if there was one."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        if not self._at_once:
            await asyncio.sleep(self._every_s)
        while True:
            await self._work()
            await asyncio.sleep(self._every_s)
