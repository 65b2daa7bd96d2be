"""Reads values of a `config.json` strictly: a value of the wrong type or range is rejected by its key. Pure."""

import math
from typing import Any

Raw = dict[str, Any]


def integer(raw: Raw, key: str, default: int | None = None) -> int:
    """Return an integer, or the default if the key is absent.

    Raises KeyError without default, ValueError for any other value.
    """
    value = number(raw, key, default)
    if not float(value).is_integer():
        raise ValueError(f"{key} {value!r} is not a whole number")
    return int(value)


def positive(raw: Raw, key: str, default: float | None = None) -> float:
    """Return a finite number above 0; otherwise like `integer`."""
    value = number(raw, key, default)
    if value <= 0:
        raise ValueError(f"{key} {value!r} is not positive")
    return float(value)


def number(raw: Raw, key: str, default: float | None = None) -> float:
    """Return a finite number; otherwise like `integer`."""
    value = raw.get(key, default)
    if value is None and key not in raw:
        raise KeyError(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{key} {value!r:.80} is not a number")
    return value


def flag(raw: Raw, key: str, *, default: bool = False) -> bool:
    """Return a bool, or the default if the key is absent or null. Raises ValueError for any other value."""
    value = raw.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"{key} {value!r:.80} is neither true nor false")  # noqa: TRY004 - as for any other bad value
    return value
