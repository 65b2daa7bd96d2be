"""Work that a process does again and again beside its requests. Knows nothing of the work."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress


class Repeating:
    """Does `work` every so many seconds in a task of its own, first after one pause or `at_once`. What it raises ends it."""

    def __init__(self, work: Callable[[], Awaitable[None]], every_s: float, *, at_once: bool = False) -> None:
        self._work = work
        self._every_s = every_s
        self._at_once = at_once
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin. Call in the serving loop."""
        self._task = asyncio.create_task(self._repeat())

    async def stop(self) -> None:
        """End, in the middle of the work if need be. Raises what has ended it before, if anything did."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _repeat(self) -> None:
        if not self._at_once:
            await asyncio.sleep(self._every_s)
        while True:
            await self._work()
            await asyncio.sleep(self._every_s)
