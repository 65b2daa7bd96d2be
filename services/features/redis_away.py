"""Redis' failures as this project's error: the one place that says what counts as the store being away."""

from collections.abc import Iterator
from contextlib import contextmanager

from services.errors import DependencyAway


@contextmanager
def redis_as_dependency(retry_after_s: float = 1.0) -> Iterator[None]:
    """Raise DependencyAway for what redis-py raises, timeouts of its own and of asyncio included."""
    from redis.exceptions import RedisError

    try:
        yield
    except (RedisError, OSError) as error:  # a timeout is an OSError
        raise DependencyAway("features", retry_after_s) from error
