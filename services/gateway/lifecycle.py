"""Starts the parts of a process in one order and stops them in the reverse order."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import structlog

log = structlog.get_logger()


class Thread(Protocol):
    """A part with its own thread, such as a producer."""

    def start(self) -> None:
        """Start the thread. Does not block."""
        ...

    def stop(self) -> None:
        """Stop the thread; may block for seconds."""
        ...


@dataclass(frozen=True, slots=True)
class BackgroundPart:
    """One part; `start` is None for a part that needs only a stop. `name` labels its logs."""

    name: str
    stop: Callable[[], Awaitable[Any]]
    start: Callable[[], Awaitable[Any]] | None = None

    @classmethod
    def threads(cls, name: str, threads: Sequence[Thread]) -> "BackgroundPart":
        """Return a part of several threads, which stop at the same time."""
        return cls(name, lambda: _stop_threads(name, threads), lambda: _start_threads(name, threads))


class Lifecycle:
    """The parts of one process, in their order of starting."""

    def __init__(self, parts: Sequence[BackgroundPart]) -> None:
        self._parts = parts
        self._running = AsyncExitStack()

    async def start(self) -> None:
        """Start all parts. If one fails, stop the parts that were started, and raise its error."""
        async with AsyncExitStack() as started:
            for part in self._parts:
                if part.start is not None:
                    await part.start()
                started.push_async_callback(_stop, part.name, part.stop)
            self._running = started.pop_all()

    async def stop(self) -> None:
        """Stop the started parts. The failure of a part is logged and does not prevent the stop of other parts."""
        await self._running.aclose()


async def _stop(name: str, stop: Callable[[], Awaitable[Any]]) -> None:
    try:
        await stop()
    except Exception:
        log.exception("part_not_stopped", part=name)


async def _start_threads(name: str, threads: Sequence[Thread]) -> None:
    for number, thread in enumerate(threads):
        try:
            thread.start()
        except BaseException:
            await _stop_threads(name, threads[:number])
            raise


async def _stop_threads(name: str, threads: Sequence[Thread]) -> None:
    await asyncio.gather(*(_stop(name, partial(asyncio.to_thread, thread.stop)) for thread in threads))
