"""Explanations of recent requests in Redis, beside the features: in buckets of some seconds, which expire.

A bucket is one hash by request id: writing many records is one command, far cheaper for a gateway than a key for each.

Constructed and used on one event loop; a connection is made at the first use. Does not know the content of a record.
"""

import time
from collections.abc import Callable, Sequence

from services.features.redis_calls import redis_as_dependency, within
from services.settings.addresses import RedisAddress

_PREFIX = "tailrace:explain:"
_BUCKETS = 30


class RedisExplanations:
    """Keeps each record for at least `keep_s` seconds, and a thirtieth of that longer at most, in steps of whole seconds."""

    def __init__(self, address: RedisAddress, keep_s: int, wall_clock: Callable[[], float] = time.time) -> None:
        """Make the client. Raises ConfigError for a bad password file."""
        from redis.asyncio import Redis

        self._client = Redis(**address.client_options())
        self._bucket_s = max(1, keep_s // _BUCKETS)
        self._num_buckets = -(-keep_s // self._bucket_s)
        self._wall_clock = wall_clock

    async def put(self, records: Sequence[tuple[str, bytes]], timeout_s: float) -> None:
        """Store records (request id, bytes) in one exchange. Raises DependencyAway; then they may have been stored."""
        bucket = self._key(0)
        with redis_as_dependency():
            pipe = self._client.pipeline(transaction=False)
            pipe.hset(bucket, items=[part for record in records for part in record])
            pipe.expire(bucket, (self._num_buckets + 1) * self._bucket_s)
            await within(timeout_s, pipe.execute())

    async def get(self, request_id: str, timeout_s: float) -> bytes | None:
        """Return the newest record of this id; None without one. Raises DependencyAway."""
        with redis_as_dependency():
            pipe = self._client.pipeline(transaction=False)
            for age in range(-1, self._num_buckets + 1):  # -1: another replica's clock may be ahead
                pipe.hget(self._key(age), request_id)
            found: list[bytes | None] = await within(timeout_s, pipe.execute())
        return next((record for record in found if record is not None), None)

    def _key(self, age: int) -> str:
        """Return the key of the bucket of this many steps ago."""
        return f"{_PREFIX}{int(self._wall_clock()) // self._bucket_s - age}"

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()
