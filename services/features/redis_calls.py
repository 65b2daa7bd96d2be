"""Calls to Redis: bounded in time, with every failure as a TailraceError. Does not know the data."""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from services.errors import DependencyUnavailable, ReplicaOnly

T = TypeVar("T")

_NUM_TICKS = 4
"""`within` looks this often how late its event loop is; one more tick of lateness in all makes it a stall."""


class LoopStalled(TimeoutError):
    """A time limit passed while this process's event loop was late, so the server may have replied in time."""


@contextmanager
def redis_as_dependency(retry_after_s: float = 1.0) -> Iterator[None]:
    """Raise DependencyUnavailable for redis-py's errors, including its timeouts and the timeouts of `within`."""
    from redis.exceptions import (
        AuthenticationError,
        MasterDownError,
        NoPermissionError,
        OutOfMemoryError,
        ReadOnlyError,
        RedisError,
    )

    try:
        yield
    except (ReadOnlyError, MasterDownError) as error:
        raise ReplicaOnly("features", retry_after_s, "the server became a replica in a failover") from error
    except (AuthenticationError, NoPermissionError, OutOfMemoryError) as error:
        raise DependencyUnavailable("features", retry_after_s, str(error)) from error
    except (RedisError, OSError) as error:  # a timeout is an OSError
        raise DependencyUnavailable("features", retry_after_s) from error


async def within(timeout_s: float, call: Coroutine[Any, Any, T]) -> T:
    """Return the result of `call`, or raise TimeoutError after `timeout_s` seconds.

    A call that timed out, or whose caller was cancelled, is cancelled and not awaited: redis-py may continue to
    connect, with its own retries, for seconds after it was cancelled. If the loop was late for a quarter of the limit,
    a reply may lie unread: the call gets another quarter, and its timeout is raised as LoopStalled.
    """
    task = asyncio.ensure_future(call)
    try:
        is_stalled = await _has_stalled(task, max(0.0, timeout_s) / _NUM_TICKS)
    finally:
        if not task.done():
            task.cancel()
            task.add_done_callback(_retrieve_error)
    if not task.done():
        raise LoopStalled if is_stalled else TimeoutError
    return task.result()


async def _has_stalled(task: "asyncio.Task[Any]", tick_s: float) -> bool:
    """Await the task for `_NUM_TICKS` ticks, and one more if the loop was late; return whether it was."""
    clock = asyncio.get_running_loop().time
    began_s = now_s = clock()
    late_s = 0.0
    for number in range(1, _NUM_TICKS + 1):
        due_s = max(now_s, began_s + number * tick_s)
        await asyncio.wait({task}, timeout=due_s - now_s)
        if task.done():
            return False
        now_s = clock()
        late_s += max(0.0, now_s - due_s)
    if late_s <= tick_s:
        return False
    await asyncio.wait({task}, timeout=tick_s)
    return True


def _retrieve_error(task: "asyncio.Task[Any]") -> None:
    """Retrieve a late call's error, which asyncio would report otherwise."""
    if not task.cancelled():
        task.exception()
