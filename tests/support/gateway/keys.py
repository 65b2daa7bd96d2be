"""API keys for tests: a stored key whose text is its ID, and the header that sends a key."""

from datetime import datetime
from typing import Any

from services.contracts.access import Scope
from services.gateway.access.keys import StoredHash, StoredKey, hash_of


def stored_key(
    key_id: str, *scopes: Scope, hashes: dict[str, datetime | None] | None = None, **fields: Any
) -> StoredKey:
    """Build a key with these scopes.

    `hashes` maps the key's texts to their expiries (default: its ID, without an expiry).
    """
    ends = {key_id: None} if hashes is None else hashes
    stored = tuple(StoredHash(sha256=hash_of(key), expires_at=end) for key, end in ends.items())
    return StoredKey(id=key_id, hashes=stored, scopes=frozenset(scopes), **fields)


def bearer(key: str | None) -> dict[str, str]:
    """Return the header of a key; none for a caller without a key."""
    return {} if key is None else {"authorization": f"Bearer {key}"}
