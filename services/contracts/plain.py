"""Strict reading of plain values from JSON, TOML and messages; errors name the path. Knows no transport."""

import difflib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from heapq import nlargest
from itertools import pairwise
from typing import Any

from services.errors import InvalidRequest

MAX_TEXT_CHARS = 256
_NUM_OFFERED, _NUM_LIKELY, _NUM_MAYBE = 3, 6, 64
_MAX_COMPARED, _COMPARED_CHARS = 1_000, 64
"""difflib takes half a millisecond per pair, so it compares only the most likely names."""


def read_object(path: str, value: Any, known: Sequence[str]) -> Mapping[str, Any]:
    """Return the non-null fields of an object. Raises InvalidRequest for unknown fields."""
    if not isinstance(value, Mapping):
        raise InvalidRequest(path, "not an object", f"send an object with {', '.join(known)}")
    for name in value:
        if name not in known:
            raise InvalidRequest(f"{path}.{name}", "unknown", f"the fields are {', '.join(known)}")
    return {name: one for name, one in value.items() if one is not None}


def read_list(path: str, value: Any, most: int) -> Sequence[Any]:
    """Return the entries of a list of at most `most`. Raises InvalidRequest."""
    if not isinstance(value, list | tuple):
        raise InvalidRequest(path, "not a list", "send a list")
    if len(value) > most:
        raise InvalidRequest(path, f"{len(value)} entries", f"send at most {most}")
    return value


def read_text(path: str, value: Any) -> str:
    """Return a text of 1 to 256 printable characters. Raises InvalidRequest."""
    if not isinstance(value, str):
        raise InvalidRequest(path, "not a string", "send a string")
    if not value or len(value) > MAX_TEXT_CHARS:
        raise InvalidRequest(path, f"{len(value)} characters long", f"send 1 to {MAX_TEXT_CHARS}")
    if not value.isprintable():
        raise InvalidRequest(path, "has control characters", "send printable characters only")
    return value


def read_number(path: str, value: Any, least: float = -math.inf, most: float = math.inf) -> float:
    """Return a finite number within these bounds. Raises InvalidRequest."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(path, "not a number", "send a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InvalidRequest(path, "not a finite number", "send a number that fits in 64 bits")
    if not least <= number <= most:
        raise InvalidRequest(path, f"{value} is out of range", f"send {least:g} to {most:g}")
    return number


def read_int(path: str, value: Any, least: int, most: int) -> int:
    """Return a whole number within these bounds. Raises InvalidRequest."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(path, "not a whole number", f"send {least} to {most}")
    if not least <= value <= most:
        raise InvalidRequest(path, f"{value} is out of range", f"send {least} to {most}")
    return value


def required(path: str, fields: Mapping[str, Any], name: str) -> Any:
    """Return a required field. Raises InvalidRequest."""
    if name not in fields:
        raise InvalidRequest(f"{path}.{name}", "missing", f"send {name}")
    return fields[name]


def nearest(name: str, known: Collection[str] | Iterable[str]) -> str:
    """Return a fix that offers the nearest known names, or else the first known names, or says that none exist."""
    names = sorted(known)[:_MAX_COMPARED]
    if not names:
        return "leave it out, there are none"
    folded = {one.casefold()[:_COMPARED_CHARS]: one for one in names}
    wanted = name[:_COMPARED_CHARS].casefold()[:_COMPARED_CHARS]
    likely = nlargest(_NUM_LIKELY, nlargest(_NUM_MAYBE, folded, key=partial(_alike, wanted)), partial(_near, wanted))
    near = [folded[one] for one in difflib.get_close_matches(wanted, likely, n=_NUM_OFFERED)]
    offered = ", ".join(f"{one!r:.60}" for one in near or names[: 4 * _NUM_OFFERED])
    return f"the nearest: {offered}" if near else f"name one that there is, for example {offered}"


def _alike(wanted: str, name: str) -> float:
    """Return a similarity of two names by their characters and lengths."""
    return len(set(name).intersection(wanted)) - abs(len(name) - len(wanted)) / 8


def _near(wanted: str, name: str) -> float:
    """Return a similarity of two names by their pairs of characters."""
    pairs, others = (set(pairwise(one)) for one in (wanted, name))
    return len(pairs & others) / (1 + len(pairs) + len(others))
