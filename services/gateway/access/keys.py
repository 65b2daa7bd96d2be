"""The keys file: ids, scopes, limits and hashes of the keys; never a key itself.

    {"keys": [{"id": "shop", "rate_per_s": 50, "burst": 100, "daily_quota": null, "max_k": 100, "priority": "high",
               "hashes": [{"sha256": "9f86...", "expires_at": null}], "scopes": ["recommend", "events"]}]}

JSON, since a command writes it. A key is 256 random bits, so SHA-256 protects it as well as a slow hash would (it
cannot be guessed), and a check costs a microsecond; a slow hash would let anyone load the server with wrong keys. Two
hashes under one id are a rotation: both keys are valid until the older one expires.
"""

import hashlib
import json
import secrets
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Self, TypeVar

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from models.files import write_durably
from services.contracts.access import Priority, Scope
from services.contracts.recommend import MAX_K
from services.contracts.tenant import DEFAULT_TENANT, check_tenant
from services.errors import ConfigError
from services.settings.refusals import problem_and_fix

PREFIX = "trk_"
"""Prefix of every key, so that scanners detect keys committed by mistake."""

_SETTINGS = {"keys": "TAILRACE_API_KEYS_FILE", "tenants": "TAILRACE_TENANTS_FILE"}
"""The setting of each file, by the command that makes it."""
_SECRET_BYTES = 32

_HASH, _KEY_ID = r"^[0-9a-f]{64}$", r"^[a-z0-9][a-z0-9._-]{0,63}$"
Hash = Annotated[str, Field(pattern=_HASH)]
KeyId = Annotated[str, Field(pattern=_KEY_ID)]
FORMS = {
    _HASH: "64 hexadecimal digits",
    _KEY_ID: "up to 64 of a to z, 0 to 9, dot, dash and underscore, first a letter or digit",
}
"""The valid forms of texts in these files, by regular expression."""


class Stored(BaseModel):
    """A value of a settings file that a command writes: frozen, without unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Checked = TypeVar("Checked", bound=Stored)


class StoredHash(Stored):
    """One key's hash and its expiry; None: valid until revoked."""

    sha256: Hash
    expires_at: AwareDatetime | None = None

    def expires_unix_s(self) -> float:
        """Return the expiry in Unix seconds; infinity without one."""
        return float("inf") if self.expires_at is None else self.expires_at.timestamp()


class StoredLimits(Stored):
    """The limits of one id. None means no limit of its own."""

    id: str
    rate_per_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    burst: float | None = Field(None, ge=1, allow_inf_nan=False)
    daily_quota: int | None = Field(None, ge=0)
    max_k: int | None = Field(None, ge=1, le=MAX_K)

    @model_validator(mode="after")
    def _burst_needs_a_rate(self) -> Self:
        if self.burst is not None and self.rate_per_s is None:
            raise ValueError("burst needs rate_per_s; give both")
        return self


class StoredKey(StoredLimits):
    """One id: its tenant, hashes, scopes and limits."""

    id: KeyId
    tenant: str = DEFAULT_TENANT
    hashes: tuple[StoredHash, ...] = Field(min_length=1)
    scopes: frozenset[Scope] = Field(min_length=1)
    priority: Priority = Priority.NORMAL

    @model_validator(mode="before")
    @classmethod
    def _read_priority(cls, given: object) -> object:
        """Accept the priority by name."""
        if isinstance(given, dict) and isinstance(name := given.get("priority"), str):
            if name.upper() not in Priority.__members__:
                raise ValueError(
                    f"unknown priority {name}; give {', '.join(priority.name.lower() for priority in Priority)}"
                )
            return {**given, "priority": Priority[name.upper()]}
        return given

    @field_validator("tenant")
    @classmethod
    def _check_tenant(cls, tenant: str) -> str:
        return check_tenant(tenant) if tenant else tenant

    @property
    def ends_at(self) -> datetime | None:
        """Expiry of the last of its hashes; None if a hash never expires."""
        ends = [stored.expires_at for stored in self.hashes if stored.expires_at is not None]
        return max(ends) if len(ends) == len(self.hashes) else None


class KeysFile(Stored):
    """All keys. Each change returns a new value."""

    keys: tuple[StoredKey, ...] = ()

    @model_validator(mode="after")
    def _refuse_doubles(self) -> "KeysFile":
        ids = [key.id for key in self.keys]
        hashes = [stored.sha256 for key in self.keys for stored in key.hashes]
        if len(set(ids)) < len(ids) or len(set(hashes)) < len(hashes):
            raise ValueError("an id or a hash is there twice; remove one")
        return self

    def find(self, key_id: str) -> StoredKey | None:
        return next((key for key in self.keys if key.id == key_id), None)

    def with_new(self, key: StoredKey) -> "KeysFile":
        """Add a key. Raises ConfigError if its id is taken."""
        if self.find(key.id) is not None:
            raise ConfigError(f"key {key.id}: the id is taken; rotate or revoke the key, or choose another id")
        return KeysFile(keys=(*self.keys, key))

    def rotated(
        self, key_id: str, sha256: str, now: datetime, overlap: timedelta, expires_at: datetime | None = None
    ) -> "KeysFile":
        """Add a hash to an id; its previous hashes stay valid for at most `overlap`. Raises ConfigError.

        The new hash keeps the key's expiry unless `expires_at` replaces it.
        """
        key = self._existing(key_id)
        new_end = expires_at or key.ends_at
        if new_end is not None and new_end <= now:
            raise ConfigError(f"key {key_id}: it ended on {new_end:%Y-%m-%d}; say --expires-in-days for the new one")
        end = now + overlap
        kept = tuple(
            stored.model_copy(update={"expires_at": min(end, stored.expires_at or end)})
            for stored in key.hashes
            if stored.expires_at is None or stored.expires_at > now
        )
        changed = key.model_copy(update={"hashes": (*kept, StoredHash(sha256=sha256, expires_at=new_end))})
        return KeysFile(keys=tuple(changed if key.id == key_id else key for key in self.keys))

    def without(self, key_id: str) -> "KeysFile":
        """Revoke an id with all its hashes. Raises ConfigError if it is unknown."""
        self._existing(key_id)
        return KeysFile(keys=tuple(key for key in self.keys if key.id != key_id))

    def _existing(self, key_id: str) -> StoredKey:
        key = self.find(key_id)
        if key is None:
            raise ConfigError(f"key {key_id}: unknown; `tailrace keys list` shows the keys")
        return key


def make_key() -> str:
    """Create a key: 256 random bits in 47 characters that need no quoting anywhere."""
    return PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def hash_of(key: str) -> str:
    """Return a key's hash as written in the file."""
    return digest_of(key).hex()


def read_keys(path: Path) -> KeysFile:
    """Read a keys file. Raises ConfigError; the message quotes no value of the file."""
    return read_checked(path, KeysFile, "keys")


def read_checked(path: Path, kind: type[Checked], what: str) -> Checked:
    """Read a JSON file that `tailrace {what} new` makes. Raises ConfigError without values of the file."""
    setting = _SETTINGS[what]
    try:
        return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{setting}: {path}: {error.strerror}; `tailrace {what} new` makes one") from error
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        field = "".join(f"{part}." for part in first["loc"])
        field = f"{field[:-1]}: " if field else ""
        raise ConfigError(f"{setting}: {path}: {field}{problem_and_fix(first, FORMS, with_value=False)}") from None


def write_keys(path: Path, keys: KeysFile) -> None:
    """Replace or create the file atomically, readable only by its owner."""
    write_privately(path, _as_text(keys))


def write_privately(path: Path, text: str) -> None:
    """Replace or create a file atomically, readable only by its owner."""
    write_durably(path.resolve(), text.encode(), mode=0o600)


def _as_text(keys: KeysFile) -> str:
    plain = keys.model_dump(mode="json")
    for key in plain["keys"]:
        key["priority"] = Priority(key["priority"]).name.lower()
        key["scopes"] = sorted(key["scopes"])
        if not key["tenant"]:
            del key["tenant"]
    return json.dumps(plain, indent=2) + "\n"
