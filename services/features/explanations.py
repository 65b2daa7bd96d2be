"""Explanations of recent requests in Redis, beside the features: one key per request, gone by itself after a while.

Constructed and used on one event loop; a connection is made at the first use. Does not know what an explanation says.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from services.errors import DependencyAway
from services.redis_address import RedisAddress

_PREFIX = "tailrace:explain:"
_RETRY_AFTER_S = 1.0


class RedisExplanations:
    """Keeps each record for `keep_s` seconds."""

    def __init__(self, address: RedisAddress, keep_s: int) -> None:
        """Make the client. Raises ConfigError for a bad password file."""
        from redis.asyncio import Redis

        self._client = Redis(**address.client_options())
        self._keep_s = keep_s

    async def put(self, records: Sequence[tuple[str, bytes]], timeout_s: float) -> None:
        """Keep records (request id, bytes) in one exchange. Raises DependencyAway; then some may have been kept."""
        with _redis_as_dependency():
            async with asyncio.timeout(timeout_s), self._client.pipeline(transaction=False) as pipe:
                for request_id, record in records:
                    pipe.set(_PREFIX + request_id, record, ex=self._keep_s)
                await pipe.execute()

    async def get(self, request_id: str, timeout_s: float) -> bytes | None:
        """Give what is kept under this id, if anything. Raises DependencyAway."""
        with _redis_as_dependency():
            async with asyncio.timeout(timeout_s):
                found: bytes | None = await self._client.get(_PREFIX + request_id)
        return found

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


@contextmanager
def _redis_as_dependency() -> Iterator[None]:
    from redis.exceptions import RedisError

    try:
        yield
    except (RedisError, OSError) as error:  # a timeout is an OSError
        raise DependencyAway("features", _RETRY_AFTER_S) from error
