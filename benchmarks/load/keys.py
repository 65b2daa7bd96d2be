"""API keys for the callers of a benchmark."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.contracts.access import Priority, Scope
from services.gateway.access.keys import KeysFile, StoredHash, StoredKey, hash_of, make_key, write_keys


@dataclass(frozen=True, slots=True)
class CallerKeys:
    """A key for each priority, with the scopes of a product, and an operator's key with every scope."""

    by_priority: Mapping[Priority, str]
    operator: str


def write_caller_keys(path: Path) -> CallerKeys:
    """Make keys, and write the keys file of a stack that knows them."""
    keys = CallerKeys({priority: make_key() for priority in Priority}, make_key())
    scopes = frozenset({Scope.RECOMMEND, Scope.EVENTS})
    stored = [_stored(priority.name.lower(), key, scopes, priority) for priority, key in keys.by_priority.items()]
    stored.append(_stored("operator", keys.operator, frozenset(Scope), Priority.NORMAL))
    write_keys(path, KeysFile(keys=tuple(stored)))
    return keys


def _stored(key_id: str, key: str, scopes: frozenset[Scope], priority: Priority) -> StoredKey:
    return StoredKey(id=key_id, hashes=(StoredHash(sha256=hash_of(key)),), scopes=scopes, priority=priority)
