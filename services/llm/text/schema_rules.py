r"""Prepares a JSON schema for llguidance: rewrites inexactly supported keywords, and rejects unsupported ones. Pure.

    exclusive bounds          inclusive bounds, the next decimal inside: llguidance's ranges may include the bound
    itself
    integer bounds            kept within 64 bits and exact as floats, which llguidance computes with
    `\s` in a pattern          ECMA's white space, which JSON Schema requires; Rust's differs in two characters
    date, time, date-time,    patterns whose texts validators accept: February 29 only in leap years, no second 60,
    email, hostname           bounded labels
    patternProperties         rejected if a pattern matches a declared property
    const, enum               integers that no float holds are rejected: llguidance would round them
    unbounded recursion       rejected: no finite text satisfies it

A rewritten schema allows the same texts or fewer, never more.
"""

import math
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from services.errors import InvalidRequest

Schema = dict[str, Any]

FIELD = "response_format"
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE = ("items", "additionalProperties", "additionalItems", "not", "contains", "propertyNames", "if", "then", "else")
_DIGITS = 12
"""Significant decimal digits between an exclusive bound and the inclusive bound that replaces it."""
_MOST_INTEGER = 2**63 - 1024
"""The largest float below 2^63."""
_MOST_FLOAT = 2**1023
_SPACE = r"\t\n\x0b\x0c\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_YEAR, _MONTH_DAY = r"[0-9]{4}", r"(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = rf"(?:{_YEAR}-(?:{_MONTH_DAY}|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = r"[A-Za-z0-9]{1,15}(?:-[A-Za-z0-9]{1,15}){0,3}"
_ATOM = r"[A-Za-z0-9_+-]{1,20}"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "hostname": rf"{_LABEL}(?:\.{_LABEL}){{0,2}}",
    "email": rf"{_ATOM}(?:\.{_ATOM}){{0,2}}@{_LABEL}(?:\.{_LABEL}){{1,2}}",
}

Matcher = Callable[[str], Callable[[str], bool]]
"""Compiles a pattern to a function that returns whether it matches anywhere in a text."""


def prepared(schema: Schema, matcher: Matcher) -> Schema:
    """Return the schema for the grammar. Raises InvalidRequest naming the keyword and its path."""
    if not _Finite(schema).is_root_finite():
        raise refusal("", "recursive without end: no finite text satisfies it", "make the recursive property optional")
    rewritten: Schema = _prepare(schema, "", matcher)
    return rewritten


def refusal(path: str, problem: str, fix: str) -> InvalidRequest:
    return InvalidRequest(FIELD, f"{path}: {problem}" if path else problem, fix)


def _prepare(schema: Any, path: str, matcher: Matcher) -> Any:
    if not isinstance(schema, dict):
        return schema
    _refuse_overlaps(schema, path, matcher)
    for name in ("const", "enum"):
        _refuse_inexact(schema.get(name), f"{path}/{name}")
    made = {**schema, **_bounds(schema, path)}
    for name in ("exclusiveMinimum", "exclusiveMaximum"):
        made.pop(name, None)
    if isinstance(schema.get("pattern"), str):
        made["pattern"] = _with_ecma_space(schema["pattern"])
    for name in _BY_NAME:
        if isinstance(schema.get(name), dict):
            made[name] = {
                key: _prepare(subschema, f"{path}/{name}/{key}", matcher) for key, subschema in schema[name].items()
            }
    if isinstance(schema.get("patternProperties"), dict):
        made["patternProperties"] = {
            _with_ecma_space(key): subschema for key, subschema in made["patternProperties"].items()
        }
    for name in _LISTS:
        if isinstance(schema.get(name), list):
            made[name] = [
                _prepare(subschema, f"{path}/{name}/{index}", matcher) for index, subschema in enumerate(schema[name])
            ]
    for name in _SINGLE:
        if isinstance(schema.get(name), dict):
            made[name] = _prepare(schema[name], f"{path}/{name}", matcher)
    return _with_format_pattern(made)


def _refuse_overlaps(schema: Schema, path: str, matcher: Matcher) -> None:
    """Reject a pattern that matches a declared property: llguidance's grammar of both may fail within a text."""
    declared, patterns = schema.get("properties"), schema.get("patternProperties")
    if not (isinstance(declared, dict) and isinstance(patterns, dict)):
        return
    for pattern in patterns:
        name = next(filter(matcher(pattern), declared), None)
        if name is not None:
            problem = f"{pattern!r:.80} matches the declared property {name!r:.80}"
            raise refusal(f"{path}/patternProperties", problem, "declare the property only, or change the pattern")


def _refuse_inexact(value: Any, path: str) -> None:
    """Reject an integer that llguidance, which computes with floats, would round."""
    if isinstance(value, dict | list):
        for nested in value.values() if isinstance(value, dict) else value:
            _refuse_inexact(nested, path)
    elif isinstance(value, int) and abs(value) > 2**53:
        nearest = float(value) if abs(value) < _MOST_FLOAT else 0.0
        written = int(nearest) if abs(value) < 2**63 else int(Decimal(repr(nearest)))
        if written != value:
            raise refusal(path, f"{value!s:.40} cannot be written exactly", "send integers up to 2^53, or text")


def _bounds(schema: Schema, path: str) -> Schema:
    """Return the inclusive bounds that replace a schema's bounds."""
    made = {}
    is_integer = _is_integer(schema)
    for inclusive, exclusive, inwards in (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1)):
        bound: Any = schema.get(inclusive)
        outside: Any = schema.get(exclusive)
        outside = bound if outside is True else outside  # as in draft 4
        bounds = [bound] if _is_number(bound) else []
        if _is_number(outside):
            bounds.append(_next_inside(outside, inwards, is_integer=is_integer))
        if bounds:
            bound = max(bounds) if inwards > 0 else min(bounds)
            made[inclusive] = _within_64_bits(bound, inwards, f"{path}/{inclusive}") if is_integer else bound
    return made


def _next_inside(bound: float, inwards: int, *, is_integer: bool) -> float:
    """Return the next number inside an exclusive bound, with a few digits more."""
    if is_integer:
        return math.floor(bound) + 1 if inwards > 0 else math.ceil(bound) - 1
    exact = Decimal(repr(bound))
    step = Decimal(1).scaleb((exact.adjusted() if exact else 0) - _DIGITS)
    inside = float(exact + inwards * step)
    return inside if inside != bound else math.nextafter(bound, inwards * math.inf)


def _within_64_bits(bound: float, inwards: int, path: str) -> float:
    """Return an integer bound that fits a float and 64 bits, moved inwards if needed."""
    if bound * inwards > _MOST_INTEGER:
        raise refusal(path, f"{bound} is beyond 64 bits", f"send at most {_MOST_INTEGER} away from 0")
    if abs(bound) > _MOST_INTEGER:
        return -inwards * _MOST_INTEGER
    nearest = float(bound)
    if (nearest - bound) * inwards < 0 and isinstance(bound, int):
        nearest = math.nextafter(nearest, inwards * math.inf)
    return int(nearest) if nearest.is_integer() else nearest


def _is_integer(schema: Schema) -> bool:
    """Whether the numbers of a schema are integers."""
    types = schema.get("type")
    return types == "integer" or (isinstance(types, list) and "integer" in types and "number" not in types)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _with_ecma_space(pattern: str) -> str:
    r"""Return a pattern with `\s` and `\S` expanded."""
    parts, is_in_class, characters = [], False, iter(pattern)
    for character in characters:
        if character == "\\":
            parts.append(_escape(next(characters, ""), is_in_class=is_in_class))
            continue
        is_in_class = character == "[" or (is_in_class and character != "]")
        parts.append(character)
    return "".join(parts)


def _escape(kind: str, *, is_in_class: bool) -> str:
    if kind == "s":
        return _SPACE if is_in_class else f"[{_SPACE}]"
    return f"[^{_SPACE}]" if kind == "S" else f"\\{kind}"


def _with_format_pattern(schema: Schema) -> Schema:
    pattern = _FORMATS.get(schema["format"]) if isinstance(schema.get("format"), str) else None
    if pattern is None:
        return schema
    rest = {name: value for name, value in schema.items() if name != "format"}
    pattern = f"^(?:{pattern})$"
    if "pattern" not in rest:
        return {**rest, "pattern": pattern}
    return {**rest, "allOf": [*rest.get("allOf", ()), {"pattern": pattern}]}


class _Finite:
    """Determines whether a finite text can satisfy a schema, by its required properties and items.

    The least fixed point over the schema's local references: initially all count as infinite, then a reference is
    finite if its schema needs only finite references.
    """

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._is_finite: dict[str, bool] = {}

    def is_root_finite(self) -> bool:
        """Whether a finite text can satisfy the root."""
        progress = (-1, -1)
        while not self._of(self._root):
            if progress == (progress := (len(self._is_finite), sum(self._is_finite.values()))):
                return False
            for reference in reversed(list(self._is_finite)):
                self._is_finite[reference] = self._is_finite[reference] or self._of(self._target(reference))
        return True

    def _of(self, schema: Any) -> bool:
        parts = list(self._parts(schema)) if isinstance(schema, dict) else []
        return all(parts)

    def _parts(self, schema: Schema) -> Iterator[bool]:
        """Yield, for each keyword that needs other schemas, whether these are finite."""
        if isinstance(reference := schema.get("$ref"), str):
            yield self._is_finite.setdefault(reference, False)
        for name in ("anyOf", "oneOf"):
            if isinstance(schema.get(name), list) and schema[name]:
                alternatives = [self._of(subschema) for subschema in schema[name]]
                yield any(alternatives)
        if isinstance(schema.get("allOf"), list):
            yield from [self._of(subschema) for subschema in schema["allOf"]]
        if schema.get("type") == "object":
            yield from [self._of(subschema) for subschema in _required(schema)]
        if schema.get("type") == "array" and schema.get("minItems"):
            yield self._of(schema.get("items"))

    def _target(self, reference: str) -> Any:
        """Return the schema that a local reference points to; None for any other reference."""
        target: Any = self._root
        for part in unquote(reference.removeprefix("#")).split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            target = target.get(key) if isinstance(target, dict) else None
        return target if reference.startswith("#") else None


def _required(schema: Schema) -> list[Any]:
    """Return the schemas of the required properties that are declared."""
    declared, required = schema.get("properties"), schema.get("required")
    if not (isinstance(declared, dict) and isinstance(required, list)):
        return []
    return [declared.get(name) for name in required if isinstance(name, str)]
