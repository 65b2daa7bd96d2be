"""Work that gets only so much time, whatever it does. Failures come back as values, so that callers route on them.

Knows nothing of what the work is. Work that ignores its cancellation is left behind, never waited for.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Settled(Generic[T]):
    """How work ended: with a value, with an error, or with neither, which means that its time was up."""

    value: T | None = None
    error: BaseException | None = None


async def time_box(work: Coroutine[Any, Any, T], timeout_s: float) -> Settled[T]:
    """Run work for at most `timeout_s` seconds. The work is cancelled when its time is up or the caller is cancelled."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=max(0.0, timeout_s))
    finally:
        if not task.done():
            task.cancel()
            task.add_done_callback(_forget)
    if not task.done():
        return Settled()
    error = _error_of(task)
    return Settled(error=error) if error is not None else Settled(value=task.result())


def _error_of(task: "asyncio.Task[T]") -> BaseException | None:
    return asyncio.CancelledError("cancelled from inside") if task.cancelled() else task.exception()


def _forget(task: "asyncio.Task[T]") -> None:
    """Look at a late task's error, so that asyncio does not report it as never retrieved."""
    _error_of(task)
