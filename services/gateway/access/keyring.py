"""The valid keys in memory, reloaded when the keys file changes.

A broken or unreadable file leaves the old keys valid, so that half an edit locks nobody out. A missing file revokes all
keys, since removal is deliberate. It must be missing at two polls, since some editors remove a file before they write
it again.

A key is looked up by the first bytes of its hash and compared in constant time; unknown keys are compared too, so the
response time does not reveal how close a wrong key was. Follows the file through symbolic links, which is how
Kubernetes replaces a secret.
"""

import asyncio
import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import structlog

from models.files import stamp_of
from services.contracts.access import Allowance, Caller
from services.errors import ConfigError
from services.gateway.access.keys import KeysFile, StoredKey, digest_of, read_keys
from services.gateway.periodic_task import PeriodicTask

log = structlog.get_logger()

POLL_S = 1.0
_INDEX_BYTES = 8
_POLLS_UNTIL_GONE = 2


class KeysState(IntEnum):
    """The source of the valid keys, as the metric reports it."""

    CURRENT = 0
    """The current file."""
    OUTDATED = 1
    """The last valid file: the current one is rejected."""
    GONE = 2
    """No key is valid: the file is missing."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The caller that owns a key, and its allowance."""

    caller: Caller
    allowance: Allowance


@dataclass(frozen=True, slots=True)
class _Entry:
    digest: bytes
    expires_unix_s: float
    holder: Holder | None


_NO_ENTRY = _Entry(bytes(len(digest_of(""))), float("inf"), None)


class KeyRing:
    """Finds the holder of a key. Reads the file at construction and whenever it changes."""

    def __init__(
        self,
        path: Path,
        max_k: int,
        on_state: Callable[[KeysState], None] = lambda _: None,
    ) -> None:
        """Read the file. Raises ConfigError.

        Args:
            path: The file.
            max_k: Upper bound of every key's own `max_k`.
            on_state: Called with the state at construction and at each change of the file.
        """
        self._path = path
        self._max_k = max_k
        self._report_state = on_state
        self._polls_without_file = 0
        self._stamp = stamp_of(path)
        self._entries = self._read()
        self._on_state(KeysState.CURRENT)
        self._following = PeriodicTask("keys", lambda: asyncio.to_thread(self.refresh), POLL_S)

    def find(self, key: str, now_unix_s: float) -> Holder | None:
        """Return the key's holder; None if it is unknown or has expired."""
        digest = digest_of(key)
        entry = self._entries.get(digest[:_INDEX_BYTES], _NO_ENTRY)
        is_equal = hmac.compare_digest(entry.digest, digest)
        return entry.holder if is_equal and now_unix_s < entry.expires_unix_s else None

    async def start(self) -> None:
        """Start following the file. Call in the serving loop."""
        self._following.start()

    async def stop(self) -> None:
        """Stop following; the keys stay valid."""
        await self._following.stop()

    def refresh(self) -> None:
        """Read the file again if it has changed; log a broken or missing file once.

        Other errors are raised at each poll.
        """
        stamp = stamp_of(self._path)
        if stamp is None and _is_gone(self._path):
            self._polls_without_file += 1
            if self._polls_without_file == _POLLS_UNTIL_GONE:
                self._revoke_all()
            return
        self._polls_without_file = 0
        if stamp == self._stamp:
            return
        try:
            self._entries = self._read()
        except ConfigError as error:
            self._stamp = stamp
            log.error("keys_refused", error=str(error), kept=len(self._entries))  # noqa: TRY400 - no bug of ours
            self._on_state(KeysState.OUTDATED)
            return
        self._stamp = stamp
        log.info("keys_read", num_keys=len(self._entries))
        self._on_state(KeysState.CURRENT)

    def _on_state(self, state: KeysState) -> None:
        self.state = state
        self._report_state(state)

    def _revoke_all(self) -> None:
        log.error("keys_gone", path=str(self._path), revoked=len(self._entries), fix="put the keys file back")
        self._entries, self._stamp = {}, None
        self._on_state(KeysState.GONE)

    def _read(self) -> Mapping[bytes, _Entry]:
        return _index(read_keys(self._path), self._max_k)


def _holder_of(key: StoredKey, max_k: int) -> Holder:
    caller = Caller(
        key_id=key.id,
        scopes=key.scopes,
        priority=key.priority,
        max_k=min(max_k, key.max_k or max_k),
        tenant=key.tenant,
    )
    burst = key.burst or max(1.0, key.rate_per_s or 1.0)
    allowance = Allowance(rate_per_s=key.rate_per_s, burst=burst, daily_quota=key.daily_quota)
    return Holder(caller, allowance)


def _is_gone(path: Path) -> bool:
    """Whether the file does not exist, as opposed to being unreadable."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def _index(keys: KeysFile, max_k: int) -> dict[bytes, _Entry]:
    entries = {}
    for key in keys.keys:
        holder = _holder_of(key, max_k)
        for stored in key.hashes:
            digest = bytes.fromhex(stored.sha256)
            entries[digest[:_INDEX_BYTES]] = _Entry(digest, stored.expires_unix_s(), holder)
    return entries
