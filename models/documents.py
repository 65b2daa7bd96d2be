"""JSON documents of a bundle store, decoded and validated in one step.

Validation matters because any process with write access may have written them. A schema is a pydantic model or a
dataclass that declares the fields read by code. Other fields are kept unchecked, since a newer version may have written
them.
"""

import json
import re
from collections.abc import Iterable
from functools import cache, lru_cache
from hashlib import sha256
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

from models.errors import BundleCorrupt

MAX_BYTES = 64 * 2**20
"""Larger documents are rejected."""
MAX_TIME_MS = 253_402_300_799_999
"""Unix milliseconds at the end of the year 9999."""
_NUM_KEPT, _KEPT_BYTES = 16, 2**18
"""The documents read last are kept decoded: a load reads its manifest several times, and requests wait meanwhile."""
_MAX_VALID = 20_000
_VERSION = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_RESERVED = frozenset({"names", "LIVE", "PREVIOUS", "REFERENCE", "WITHDRAWN"})
"""Entries of a folder store that are not versions."""

Version = Annotated[str, StringConstraints(pattern=f"^{_VERSION}$")]
"""Name of a version: one path segment."""
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, le=2**53)]
TimeMs = Annotated[int, Field(ge=0, le=MAX_TIME_MS)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Schema(BaseModel):
    """Base class of document schemas. Types are not converted."""

    model_config = ConfigDict(strict=True, frozen=True)


Document = TypeVar("Document")
_adapter: Any = cache(TypeAdapter)
_VALID: set[bytes] = set()
"""Hashes of the documents that this process has validated."""


def decode(content: bytes | str, schema: type[Document], where: str) -> tuple[Document, dict[str, Any]]:
    """Return the content of this JSON object: the declared fields, and all non-null fields as plain values.

    Do not change the nested values. Raises BundleCorrupt naming `where` and the first wrong field.
    """
    if len(content) > MAX_BYTES:
        raise BundleCorrupt(f"{where}: {len(content):,} bytes exceed the maximum of {MAX_BYTES:,}")
    try:
        read = _read_again if len(content) <= _KEPT_BYTES else _read
        document, plain = read(content, schema)
        return document, _without_nulls(plain)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"]))[:200] or "content"
        raise BundleCorrupt(f"{where}: {field}: {first['msg'][:200]}") from error
    except (ValueError, RecursionError) as error:
        raise BundleCorrupt(f"{where}: not JSON ({str(error)[:200]})") from error


def decode_plain(content: bytes, schema: type[Document], where: str) -> dict[str, Any]:
    """Return the content as plain values, as `decode` does. A content that was valid before is only parsed."""
    digest = sha256(schema.__name__.encode() + content).digest()
    if digest in _VALID:
        parse = _parse_again if len(content) <= _KEPT_BYTES else json.loads
        return _without_nulls(parse(content))
    plain = decode(content, schema, where)[1]
    if len(_VALID) >= _MAX_VALID:
        _VALID.clear()
    _VALID.add(digest)
    return plain


_parse_again: Any = lru_cache(_NUM_KEPT)(json.loads)


def _read(content: bytes | str, schema: type[Document]) -> tuple[Document, dict[str, Any]]:
    plain: dict[str, Any] = json.loads(content, object_pairs_hook=_object)
    document: Document = _adapter(schema).validate_json(content, strict=True)
    return document, plain


_read_again: Any = lru_cache(_NUM_KEPT)(_read)


def _without_nulls(plain: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in plain.items() if value is not None}


def is_version(text: str) -> bool:
    return re.fullmatch(_VERSION, text) is not None and text not in _RESERVED


def _object(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError for a duplicate name."""
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members:
            raise ValueError(f"{name!r:.100} occurs twice")
        members[name] = value
    return members
