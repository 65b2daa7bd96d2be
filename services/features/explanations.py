"""Explanations of recent requests in Redis, within a byte budget: the oldest are deleted first.

    head ─▶ bucket n ─ n-1 ─ ... ─ n-30      each a hash: digest of the request id ─▶ record

Records go into bucket n. It is closed when it is some seconds old or holds its part of the budget; then n + 1 begins
and the oldest bucket is deleted. One script writes, so that all gateways share one count of bytes. A request id is
stored as its digest, whose length is fixed.

Constructed and used on one event loop; connects at the first use. Does not know the content of a record.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from services.features.redis_calls import redis_as_dependency, within
from services.settings.addresses import RedisAddress

_HEAD = "{tailrace:explain}"
"""In braces: all keys of a Redis Cluster's script must have one slot."""
_BUCKETS = 30
_DIGEST_BYTES = 16
_ENTRIES_PER_SCAN = 500
_ENTRY_BYTES = 96
"""Maximum overhead of an entry in Redis, besides its content."""

_PUT = """
local bucket_s, bucket_bytes, num_buckets, entry_bytes = unpack(ARGV, 1, 4)
bucket_s, bucket_bytes, num_buckets = tonumber(bucket_s), tonumber(bucket_bytes), tonumber(num_buckets)
local now_s = tonumber(redis.call('TIME')[1])
local head = redis.call('HMGET', KEYS[1], 'number', 'since_s', 'bytes')
local number, since_s, bytes = tonumber(head[1]) or 0, tonumber(head[2]) or now_s, tonumber(head[3]) or 0
for i = 5, #ARGV, 2 do
  local size = #ARGV[i] + #ARGV[i + 1] + entry_bytes
  if bytes + size > bucket_bytes or now_s >= since_s + bucket_s or now_s < since_s then
    number, since_s, bytes = number + 1, now_s, 0
    redis.call('UNLINK', KEYS[1] .. number - num_buckets)
  end
  redis.call('HSET', KEYS[1] .. number, ARGV[i], ARGV[i + 1])
  if bytes == 0 then redis.call('EXPIRE', KEYS[1] .. number, (num_buckets + 1) * bucket_s) end
  bytes = bytes + size
end
redis.call('HSET', KEYS[1], 'number', number, 'since_s', since_s, 'bytes', bytes)
"""
_GET = """
local newest = tonumber(redis.call('HGET', KEYS[1], 'number'))
if not newest then return false end
for number = newest, newest - ARGV[2], -1 do
  local record = redis.call('HGET', KEYS[1] .. number, ARGV[1])
  if record then return record end
end
return false
"""


class RedisExplanations:
    """Keeps each record for `keep_s` seconds if they fit into `max_bytes`, and at most a tenth longer."""

    def __init__(self, address: RedisAddress, keep_s: int, max_bytes: int) -> None:
        """Make the client. Raises ConfigError for a bad password file."""
        from services.settings.redis_clients import open_async_redis

        self._client = open_async_redis(address)
        self._put_script, self._get_script = self._client.register_script(_PUT), self._client.register_script(_GET)
        bucket_s = max(1, keep_s // _BUCKETS)
        self._num_buckets = -(-keep_s // bucket_s) + 1
        self._limits = (bucket_s, max_bytes // self._num_buckets, self._num_buckets, _ENTRY_BYTES)

    async def put(self, records: Sequence[tuple[str, bytes]], timeout_s: float) -> None:
        """Store records (request id, bytes) in one exchange.

        Raises DependencyUnavailable; the records may still have been stored.
        """
        words = [part for request_id, record in records for part in (_digest(request_id), record)]
        with redis_as_dependency():
            await within(timeout_s, self._put_script(keys=[_HEAD], args=[*self._limits, *words]))

    async def get(self, request_id: str, timeout_s: float) -> bytes | None:
        """Return the newest record of this id; None if unknown. Raises DependencyUnavailable."""
        with redis_as_dependency():
            call = self._get_script(keys=[_HEAD], args=[_digest(request_id), self._num_buckets])
            record: bytes | None = await within(timeout_s, call)
        return record

    async def close(self) -> None:
        await self._client.aclose()


def remove_explanations(client: Any, is_gone: Callable[[bytes], bool]) -> int:
    """Remove the records that `is_gone` selects, and return their number.

    For the worker; reads some hundred records at a time. Raises DependencyUnavailable.
    """
    num_removed = 0
    with redis_as_dependency():
        for key, name, record in each_explanation(client):
            num_removed += int(client.hdel(key, name)) if is_gone(record) else 0
    return num_removed


def each_explanation(client: Any) -> Iterator[tuple[bytes, bytes, bytes]]:
    """Yield bucket, name and record of all explanations, some hundred per exchange. Raises Redis' errors."""
    for key in client.scan_iter(match=f"{_HEAD}?*", count=_ENTRIES_PER_SCAN):
        for name, record in client.hscan_iter(key, count=_ENTRIES_PER_SCAN):
            yield key, name, record


def _digest(request_id: str) -> bytes:
    return hashlib.blake2b(request_id.encode(errors="surrogatepass"), digest_size=_DIGEST_BYTES).digest()
