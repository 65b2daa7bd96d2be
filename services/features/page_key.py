"""The key that signs page tokens, in Redis: created by the first gateway that asks, and shared by all."""

import secrets
from typing import Any

from services.features.redis_calls import redis_as_dependency, within
from services.settings.addresses import RedisAddress

_KEY = "tailrace:page-key"
_KEY_BYTES = 32


class RedisPageKey:
    """The key of one stack. Constructed and used on one event loop; connects at the first use."""

    def __init__(self, address: RedisAddress) -> None:
        """Make the client. Raises ConfigError for a bad password file."""
        from services.settings.redis_clients import open_async_redis

        self._client = open_async_redis(address)

    async def get(self, own: bytes | None, timeout_s: float) -> bytes:
        """Return the key; if Redis has none, store `own` or a new key. Raises DependencyUnavailable."""
        with redis_as_dependency():
            return await within(timeout_s, self._get(own or secrets.token_bytes(_KEY_BYTES)))

    async def _get(self, own: bytes) -> bytes:
        call: Any = self._client.set(_KEY, own, nx=True, get=True)
        before: bytes | None = await call
        return before or own

    async def close(self) -> None:
        await self._client.aclose()


class FilePageKey:
    """A key from the operator, for example for several stacks behind one host name."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    async def get(self, own: bytes | None, timeout_s: float) -> bytes:
        return self._key

    async def close(self) -> None:
        """Nothing is open."""
