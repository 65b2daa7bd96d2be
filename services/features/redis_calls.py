"""Calls to Redis: bounded in time, with every failure as a TailraceError. Does not know the data."""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from services.errors import DependencyUnavailable, ReplicaOnly

T = TypeVar("T")


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
    connect, with its own retries, for seconds after it was cancelled.
    """
    task = asyncio.ensure_future(call)
    try:
        await asyncio.wait({task}, timeout=max(0.0, timeout_s))
    finally:
        if not task.done():
            task.cancel()
            task.add_done_callback(_retrieve_error)
    if not task.done():
        raise TimeoutError
    return task.result()


def _retrieve_error(task: "asyncio.Task[Any]") -> None:
    """Retrieve a late call's error, which asyncio would report otherwise."""
    if not task.cancelled():
        task.exception()
