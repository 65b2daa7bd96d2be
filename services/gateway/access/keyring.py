"""The valid keys in memory, read again when the keys file changes. A file that is broken leaves the old keys in place.

A key is looked up by the first bytes of its hash and compared in constant time, and an unknown key is compared too: the time
of an answer does not reveal how close a wrong key was. Follows the file through symbolic links, which is how Kubernetes
replaces a secret.
"""

import asyncio
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from models.files import stamp_of
from services.contracts.access import Caller
from services.errors import ConfigError
from services.gateway.access.keys import KeysFile, StoredKey, digest_of, read_keys
from services.gateway.access.rates import Allowance
from services.gateway.periodic_task import PeriodicTask

log = structlog.get_logger()

POLL_S = 1.0
_INDEX_BYTES = 8


@dataclass(frozen=True, slots=True)
class Holder:
    """The caller to whom a key belongs, and the allowance."""

    caller: Caller
    allowance: Allowance


@dataclass(frozen=True, slots=True)
class _Entry:
    digest: bytes
    expires_unix_s: float
    holder: Holder | None


_NO_ENTRY = _Entry(bytes(len(digest_of(""))), float("inf"), None)


class KeyRing:
    """Finds the holder of a key. Reads the file at construction and again whenever it changes."""

    def __init__(self, path: Path, max_k: int, num_processes: int = 1) -> None:
        """Read the file. `max_k` bounds every key's own; rates are divided by `num_processes`. Raises ConfigError."""
        self._path = path
        self._max_k = max_k
        self._num_processes = num_processes
        self._stamp = stamp_of(path)
        self._entries = self._read()
        self._following = PeriodicTask(lambda: asyncio.to_thread(self.refresh), POLL_S)

    def find(self, key: str, now_unix_s: float) -> Holder | None:
        """Return the key's holder; None if it is unknown or has expired."""
        digest = digest_of(key)
        entry = self._entries.get(digest[:_INDEX_BYTES], _NO_ENTRY)
        is_equal = hmac.compare_digest(entry.digest, digest)
        return entry.holder if is_equal and now_unix_s < entry.expires_unix_s else None

    async def start(self) -> None:
        """Follow the file. Call in the serving loop."""
        self._following.start()

    async def stop(self) -> None:
        """Stop following; the keys stay."""
        await self._following.stop()

    def refresh(self) -> None:
        """Read the file again if it has changed; if it is broken, keep the old keys and log that once."""
        stamp = stamp_of(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            entries = self._read()
        except ConfigError as error:
            log.error("keys_refused", error=str(error), kept=len(self._entries))  # noqa: TRY400 - no bug of ours
            return
        self._entries = entries
        log.info("keys_read", num_keys=len(entries))

    def _read(self) -> Mapping[bytes, _Entry]:
        return _index(read_keys(self._path), self._max_k, self._num_processes)


def holder_of(key: StoredKey, max_k: int, num_processes: int) -> Holder:
    """Return the holder of a stored key."""
    caller = Caller(key_id=key.id, scopes=key.scopes, priority=key.priority, max_k=min(max_k, key.max_k or max_k))
    burst = key.burst or max(1.0, key.rate_per_s or 1.0)
    allowance = Allowance(rate_per_s=key.rate_per_s, burst=burst, daily_quota=key.daily_quota)
    return Holder(caller, allowance.shared_by(num_processes))


def _index(keys: KeysFile, max_k: int, num_processes: int) -> dict[bytes, _Entry]:
    entries = {}
    for key in keys.keys:
        holder = holder_of(key, max_k, num_processes)
        for one in key.hashes:
            digest = bytes.fromhex(one.sha256)
            entries[digest[:_INDEX_BYTES]] = _Entry(digest, one.expires_unix_s(), holder)
    return entries
