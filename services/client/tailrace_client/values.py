"""The types of call fields, checked before sending: JSON and messages would report a wrong type differently."""

import json
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import Any, cast

from tailrace_client.retry import TailraceError


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value: its name in errors, and a parser that raises TypeError or ValueError."""

    name: str
    read: Callable[[Any], Any]


def checked(field: str, value: Any, kind: Kind) -> Any:
    """Return the value in the doors' form. Raises TailraceError naming the field and the kind."""
    try:
        return kind.read(value)
    except (TypeError, ValueError, OverflowError):
        raise refusal(field, _wrong(value), f"send {kind.name}") from None


def checked_texts(field: str, values: Any) -> list[str]:
    """Return the entries of any iterable except a text. Raises TailraceError naming the field or the entry."""
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping):
        raise refusal(field, _wrong(values), "send a list of str")
    return [checked(f"{field}[{index}]", text, TEXT) for index, text in enumerate(values)]


def refusal(field: str, message: str, fix: str, request_id: str | None = None) -> TailraceError:
    """Return the error of a call that is not sent."""
    return TailraceError("invalid_request", message, field=field, fix=fix, request_id=request_id, num_attempts=0)


def _wrong(value: Any) -> str:
    return f"wrong type or value: {type(value).__name__}"


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    value.encode()  # half of a surrogate pair fits in no message
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError
    return float(value)


def _milliseconds(value: Any) -> float:
    milliseconds = _number(value)
    if not (isfinite(milliseconds) and milliseconds < 1 << 31):
        raise ValueError
    return milliseconds


def _integer(num_bits: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
        if not -(1 << num_bits - 1) <= number < 1 << num_bits - 1:
            raise ValueError
        return number

    return read


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError
    return cast("dict[str, Any]", json.loads(json.dumps(value, allow_nan=False)))


OBJECT = Kind("a mapping of what JSON can hold", _object)
TEXT, FLAG, NUMBER = Kind("a str", _text), Kind("a bool", _flag), Kind("a number", _number)
INT_32, INT_64 = Kind("an int of at most 32 bits", _integer(32)), Kind("an int of at most 64 bits", _integer(64))
MILLISECONDS = Kind("a number of milliseconds below 2**31", _milliseconds)
