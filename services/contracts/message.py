"""Messages: frozen structs whose declaration is the validation, the JSON schema and the form in protobuf.

A field's type, bounds and description are written once, as `Annotated[type, Meta(...)]`. `decode` reads JSON text,
`convert` reads plain values from protobuf, TOML or a query. Both raise InvalidRequest with the path of the first wrong
field in the order of the declaration. Knows no transport.
"""

import json
import marshal
import math
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from enum import Enum
from functools import cache, lru_cache, reduce
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from services.errors import InvalidRequest

MAX_ID_CHARS = 256
PRINTABLE = r"^[\p{L}\p{M}\p{N}\p{P}\p{S} \u200c-\u200f]*$"
"""JSON-schema pattern equivalent to `is_printable`. A text with this pattern is checked to be printable."""
_WITHIN_WORDS = dict.fromkeys(range(0x200C, 0x2010))
"""Joiners in Persian and Indic words and in emoji, and marks of direction, which `str.isprintable` excludes."""
_MAX_NAME_CHARS = 256
_SHOWN_CHARS = 40
_MAX_CUSTOM = 6_000
_MAX_KEPT, _MAX_KEPT_BYTES = 512, 2_048
_NO_REFERENCES = 2
"""The version of marshal that writes equal values alike."""
_SEND_ONE_OBJECT = "send one JSON object"
_HALF_A_PAIR = re.compile("[\ud800-\udfff]")
_ANY_KEY = "[...]"
"""The decoder's step to a value of a map, which it does not name."""
_LARGEST_WHOLE = 2**53


def is_printable(text: str) -> bool:
    """Return whether a text has no control characters, apart from joiners and marks of direction."""
    return text.isprintable() or text.translate(_WITHIN_WORDS).isprintable()


class InvalidField(InvalidRequest, ValueError):
    """An InvalidRequest that the decoder completes with the path of the enclosing message."""


def text(max_chars: int = MAX_ID_CHARS) -> Meta:
    """Return the bounds of a printable text of 1 to `max_chars` characters."""
    return Meta(min_length=1, max_length=max_chars, extra_json_schema={"pattern": PRINTABLE})


Id = Annotated[str, text()]
"""An identifier: 1 to 256 printable characters."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message without unknown fields, with printable texts and finite numbers.

    Attributes:
        component: The name in the OpenAPI document; empty: the class name with `Body`.
        extra_schema: Constraints that the declaration cannot express, for the JSON schema; `__post_init__` checks them.
    """

    component: ClassVar[str] = ""
    extra_schema: ClassVar[Mapping[str, Any]] = {}

    def __post_init__(self) -> None:
        """Check texts and numbers. Raises InvalidField."""
        for name, sent_name in _checked_fields(type(self)):
            value = getattr(self, name)
            if value is None or (value.__class__ is str and value.isprintable()):
                continue
            _check_value(sent_name, value)


class Answer(Message, frozen=True):
    """A message that we write: it only declares, since its values are our own."""

    def __post_init__(self) -> None:
        """Check nothing."""


M = TypeVar("M", bound=Message)


def decode(kind: type[M], body: bytes, whole: str = "body") -> M:
    """Read JSON text, which errors call `whole`. Raises InvalidRequest naming the first wrong field."""
    _num_custom.set([0])
    try:
        return _decoder(kind).decode(body)  # type: ignore[no-any-return]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        _convert(kind, decode_plain(body, whole), whole)  # names the field, also of NaN and of half a surrogate pair
        if isinstance(error, msgspec.ValidationError):  # of a field that is sent again
            raise _refusal(error, kind, whole, lambda: decode_plain(body)) from error
        raise _not_json(whole, error) from error


def decode_object(body: bytes, whole: str = "body") -> dict[str, Any]:
    """Read JSON text as an object whose fields are checked later. Raises InvalidRequest."""
    sent = decode_plain(body, whole)
    if not isinstance(sent, dict):
        raise InvalidRequest(whole, "not a JSON object", _SEND_ONE_OBJECT)
    return sent


def decode_plain(body: bytes, whole: str = "body") -> Any:
    """Read JSON text as plain values that `convert` checks later: also NaN and infinity.

    Half of a surrogate pair, which no answer could repeat, becomes a control character. Raises InvalidRequest.
    """
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        try:
            text = json.dumps(json.loads(body.decode()), ensure_ascii=False)
            return json.loads(_HALF_A_PAIR.sub(r"\\u0000", text))
        except (ValueError, RecursionError):
            raise _not_json(whole, error) from error


def _not_json(whole: str, error: Exception) -> InvalidRequest:
    if isinstance(error, RecursionError):
        return InvalidRequest(whole, "nested too deep", f"{_SEND_ONE_OBJECT} of fewer levels")
    return InvalidRequest(whole, f"not JSON: {error}", _SEND_ONE_OBJECT)


def convert(kind: type[M], plain: Any, path: str = "", *, strict: bool = True) -> M:
    """Read plain values; `strict=False` reads numbers and flags from texts, such as a query's.

    Raises InvalidRequest naming the first wrong field, below `path`.
    """
    return _convert(kind, plain, "body", path, strict=strict)


def _convert(kind: type[M], plain: Any, whole: str, path: str = "", *, strict: bool = True) -> M:
    _num_custom.set([0])
    try:
        return convert_part(kind, plain, strict=strict)
    except InvalidField as error:
        first = _first_error(kind, plain, strict=strict) or error
        raise InvalidField(join(path, first.field or "") or whole, first.problem, first.fix or "") from first


def _first_error(kind: type[Message], plain: Any, *, strict: bool) -> InvalidField | None:
    """Return the error of the first wrong field in the order of the declaration, not in the order sent."""
    _num_custom.set([0])
    try:
        convert_part(kind, _as_declared(kind, plain), strict=strict)
    except InvalidField as error:
        return error
    return None


def _as_declared(hint: Any, plain: Any) -> Any:
    """Return plain values with the fields of messages in the order of their declaration, unknown fields last."""
    for leaf in _leaves(hint):
        if isinstance(plain, list | tuple) and get_origin(leaf) in (tuple, list):
            return [_as_declared(get_args(leaf)[0], entry) for entry in plain]
        if isinstance(plain, dict) and isinstance(leaf, type) and issubclass(leaf, Message | Kept):
            hints = _hints(leaf.message() if issubclass(leaf, Kept) else leaf)
            own = {name: _as_declared(hints[name], plain[name]) for name in hints if name in plain}
            return own | {name: value for name, value in plain.items() if name not in own}
    return plain


def convert_part(kind: type[M], plain: Any, *, strict: bool = True) -> M:
    """Read plain values in `Custom.read`. Raises InvalidField, whose field is empty for the part as a whole."""
    try:
        return msgspec.convert(plain, kind, strict=strict, dec_hook=_read_custom)
    except msgspec.ValidationError as error:
        raise _refusal(error, kind, "", lambda: plain) from error
    except RecursionError as error:
        raise InvalidField("", "nested too deep", "send fewer levels") from error
    except UnicodeEncodeError as error:  # a text where another type or a field name is expected
        raise InvalidField("", "has half of a surrogate pair", "send Unicode texts") from error


def plain_of(message: Message) -> dict[str, Any]:
    """Return a message as plain values, ready for JSON."""
    plain: dict[str, Any] = msgspec.to_builtins(message)
    return plain


def encode(message: Message) -> bytes:
    return msgspec.json.encode(message)


def join(path: str, field: str) -> str:
    """Return the path of a field below a path."""
    return field if not path else path + (field if field.startswith("[") else f".{field}") if field else path


def check_id(field: str, value: str) -> None:
    """Reject an identifier that is empty, too long or not printable. Raises InvalidRequest."""
    check_text(field, value, MAX_ID_CHARS)


def valid_id(value: Any) -> str | None:
    """Return a valid identifier; None for any other value."""
    with suppress(InvalidRequest):
        if isinstance(value, str):
            check_id("id", value)
            return value
    return None


def check_text(field: str, value: str, max_chars: int) -> None:
    """Reject a text that is empty, too long or not printable. Raises InvalidRequest."""
    if not value:
        raise InvalidField(field, "empty", "send at least one character")
    if len(value) > max_chars:
        raise InvalidField(field, f"{len(value)} characters long", f"send at most {max_chars}")
    _check_value(field, value)


class Custom:
    """A class whose values have several forms in JSON: `read` decides between them."""

    __slots__ = ()

    @classmethod
    def read(cls, plain: Any) -> Any:
        """Return the value. Raises InvalidField."""
        raise NotImplementedError

    @classmethod
    def forms(cls) -> tuple[type[Any], ...]:
        """Return the types that describe it in the JSON schema: a value has any of them."""
        raise NotImplementedError


class Kept(Custom):
    """The declared type of a field whose message many callers send alike: equal values are read once."""

    __slots__ = ()

    @classmethod
    def message(cls) -> type[Message]:
        """Return the message, a subclass of this class."""
        raise NotImplementedError

    @classmethod
    def read(cls, plain: Any) -> Any:
        """Return the message. Raises InvalidField."""
        kind = cls.message()
        if isinstance(plain, kind):
            return plain
        if not isinstance(plain, dict):
            raise InvalidField("", "not an object", "send an object")
        try:
            sent = marshal.dumps(plain, _NO_REFERENCES)
        except ValueError:  # nested too deep, or of other types than JSON's
            return convert_part(kind, plain)
        return convert_part(kind, plain) if len(sent) > _MAX_KEPT_BYTES else _read_sent(kind, sent)

    @classmethod
    def forms(cls) -> tuple[type[Any], ...]:
        return (cls.message(),)


@lru_cache(_MAX_KEPT)
def _read_sent(kind: type[Message], sent: bytes) -> Message:
    return convert_part(kind, marshal.loads(sent))  # noqa: S302 - our own bytes


_num_custom: ContextVar[list[int]] = ContextVar("num_custom")
"""The number of custom values read of the current message: the decoder checks lengths of lists last."""


def _read_custom(kind: type[Any], plain: Any) -> Any:
    if not issubclass(kind, Custom):
        raise NotImplementedError(kind)
    count = _num_custom.get()
    count[0] += 1
    if count[0] > _MAX_CUSTOM:
        raise InvalidField("", f"more than {_MAX_CUSTOM:,} entries before this entry", "send fewer")
    return kind.read(plain)


@cache
def _decoder(kind: type[M]) -> Any:
    return msgspec.json.Decoder(kind, dec_hook=_read_custom)


@cache
def _hints(kind: type[Message]) -> dict[str, Any]:
    """Return the declared types by the names that callers send."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.encode_name: hints[field.name] for field in msgspec.structs.fields(kind)}


@cache
def _checked_fields(kind: type[Message]) -> tuple[tuple[str, str], ...]:
    """Return the names of the attributes with printable texts or numbers, and their names in JSON."""
    hints = get_type_hints(kind, include_extras=True)
    return tuple(
        (field.name, field.encode_name) for field in msgspec.structs.fields(kind) if _is_checked(hints[field.name])
    )


def _is_checked(hint: Any) -> bool:
    if hint is float:
        return True
    if get_origin(hint) is Annotated:
        is_printable = any(
            isinstance(meta, Meta) and (meta.extra_json_schema or {}).get("pattern") == PRINTABLE
            for meta in hint.__metadata__
        )
        return is_printable or _is_checked(hint.__origin__)
    return any(_is_checked(argument) for argument in get_args(hint))


def _check_value(path: str, value: Any) -> None:
    """Reject texts that are not printable and numbers that are not finite, in lists and maps too."""
    if isinstance(value, str):
        if not is_printable(value):
            raise InvalidField(path, "has control characters", "send printable characters only")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidField(path, "not a finite number", "send a finite number")
    elif isinstance(value, tuple | list):
        if not _are_printable(value):
            for index, entry in enumerate(value):
                _check_value(f"{path}[{index}]", entry)
    elif isinstance(value, dict):
        for name, entry in value.items():
            _check_value(path, name)
            _check_value(f"{path}.{name}", entry)


def _are_printable(values: Iterable[Any]) -> bool:
    try:
        return is_printable("".join(values))
    except TypeError:
        return False


_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
_WRONG_TYPE = re.compile(r"Expected `(.*)`, got `(.*)`", re.DOTALL)
_ENUM = re.compile(r"Invalid enum value (.*)", re.DOTALL)
_BOUND = re.compile(r"Expected `(array|object|str|int|float)(?: \| null)?` (of length )?.*", re.DOTALL)
_KINDS = {
    "array": "an array",
    "bool": "true or false",
    "datetime": "a time",
    "float": "a number",
    "int": "an integer",
    "null": "null",
    "object": "an object",
    "str": "a string",
}
_JSON_TYPES: Mapping[Any, str] = {tuple: "array", list: "array", dict: "object", str: "str", int: "int", float: "float"}


def _refusal(error: msgspec.ValidationError, kind: type[Message], whole: str, sent: Callable[[], Any]) -> InvalidField:
    """Return the error of the first wrong field; `whole` is the path of the message, `sent` returns plain values."""
    message, steps = _parts(str(error))
    cause = error.__cause__
    while _ANY_KEY in steps:
        steps = _with_key(steps, kind, sent())
    path = reduce(join, (step[:_MAX_NAME_CHARS] for step in steps), "")
    if isinstance(cause, InvalidRequest):
        return InvalidField(join(path, cause.field or "") or whole, cause.problem, cause.fix or "")
    if unknown := _UNKNOWN.fullmatch(message):
        return InvalidField(join(path, unknown[1][:_MAX_NAME_CHARS]), "unknown", _known_fields(kind, steps))
    if missing := _MISSING.fullmatch(message):
        return InvalidField(join(path, missing[1]), "missing", f"send {missing[1]}")
    if wrong := _WRONG_TYPE.fullmatch(message):
        wanted = " or ".join(_KINDS.get(name, name) for name in wrong[1].split(" | ") if name != "null")
        if not path and wrong[1] == "object":
            return InvalidField(whole, "not a JSON object", _SEND_ONE_OBJECT)
        return InvalidField(path or whole, f"not {wanted}", f"send {wanted}")
    if invalid := _ENUM.fullmatch(message):
        return InvalidField(path or whole, f"{invalid[1]:.{_SHOWN_CHARS}} is unknown", _known_values(kind, steps))
    if bound := _BOUND.fullmatch(message):
        hint, value = _hint_at(kind, steps), _value_at(sent(), steps)
        if bound[1] == "str" and isinstance(value, Mapping):
            hint, value = _wrong_name(hint, value)
        return InvalidField(path or whole, *_out_of_bounds(bound, hint, value))
    return InvalidField(path or whole, message[:_MAX_NAME_CHARS], "send a value of the schema")


def _parts(text: str) -> tuple[str, list[str]]:
    """Return the message of a decoder's error, and its path as names of fields and indices such as `[0]`."""
    message, separator, path = text.rpartition(" - at `")
    if not separator:
        return text, []
    key, is_key, inside = path.partition("` in `")
    path = inside if is_key and key == "key" else path
    return message, re.findall(r"\[(?:\d+|\.\.\.)\]|[^.\[\]]+", path.removesuffix("`").removeprefix("$"))


def _out_of_bounds(bound: re.Match[str], hint: Any, value: Any) -> tuple[str, str]:
    """Return the problem and the fix of a value outside the declared bounds."""
    names = ("min_length", "max_length") if bound[2] else ("ge", "le", "gt", "lt")
    limits = {
        name: limit for meta in _metas(hint, bound[1]) for name in names if (limit := getattr(meta, name)) is not None
    }
    wanted = _range_of(limits)
    if not bound[2]:
        shown = f"{_plain_number(value)!r:.{_SHOWN_CHARS}}" if isinstance(value, int | float) else "the value"
        return f"{shown} is out of range", f"send {wanted}"
    if not value:
        return "empty", f"send {wanted}, or omit it"
    noun = "characters long" if isinstance(value, str) else "entries"
    size = len(value) if isinstance(value, str | list | tuple | dict) else "too many"
    return f"{size} {noun}", f"send {wanted}"


def _plain_number(value: float) -> float:
    """Return a whole number as an integer: protobuf has floating-point numbers where JSON has 201."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < _LARGEST_WHOLE else value


def _range_of(limits: Mapping[str, Any]) -> str:
    limits = {name: _plain_number(limit) for name, limit in limits.items()}
    low, high = limits.get("ge", limits.get("min_length")), limits.get("le", limits.get("max_length"))
    if low is not None and high is not None:
        return f"{low} to {high}"
    above = limits.get("gt")
    words = [f"more than {above:,}"] if above is not None else [f"at least {low:,}"] if low is not None else []
    below = limits.get("lt")
    words += [f"less than {below:,}"] if below is not None else [f"at most {high:,}"] if high is not None else []
    return " and ".join(words)


def _metas(hint: Any, wanted: str) -> Iterator[Meta]:
    """Yield the bounds of a type, and of its alternatives that are of this JSON type."""
    if get_origin(hint) is Annotated:
        of = _JSON_TYPES.get(get_origin(hint.__origin__) or hint.__origin__, wanted)
        yield from (meta for meta in hint.__metadata__ if isinstance(meta, Meta) and of == wanted)
        yield from _metas(hint.__origin__, wanted)
    elif get_origin(hint) in (Union, types.UnionType):
        for argument in get_args(hint):
            yield from _metas(argument, wanted)


def _value_at(plain: Any, steps: Sequence[str]) -> Any:
    """Return the plain value at a path; None if the values have another form."""
    try:
        for step in steps:
            plain = plain[step] if isinstance(plain, Mapping) else plain[int(step[1:-1])]
    except (LookupError, TypeError, ValueError):
        return None
    return plain


def _hint_at(kind: type[Message], steps: Sequence[str]) -> Any:
    hint: Any = kind
    for step in steps:
        hint = _step(hint, step)
    return hint


def _step(hint: Any, step: str) -> Any:
    """Return the declared type of an entry or a field of a type; None if it has none."""
    for leaf in _leaves(hint):
        if step.startswith("[") and get_origin(leaf) in (tuple, list):
            return get_args(leaf)[0]
        if get_origin(leaf) is dict:
            return get_args(leaf)[1]
        if isinstance(leaf, type) and issubclass(leaf, Message) and step in _hints(leaf):
            return _hints(leaf)[step]
    return None


def _leaves(hint: Any) -> list[Any]:
    """Return the alternatives of a type, without annotations."""
    if get_origin(hint) is Annotated:
        return _leaves(hint.__origin__)
    if get_origin(hint) in (Union, types.UnionType):
        return [leaf for argument in get_args(hint) for leaf in _leaves(argument)]
    return [hint]


def _known_fields(kind: type[Message], steps: Sequence[str]) -> str:
    """Return a fix with the names of the fields at a path."""
    for leaf in _leaves(_hint_at(kind, steps)):
        if isinstance(leaf, type) and issubclass(leaf, Message):
            return f"the fields are {', '.join(sorted(_hints(leaf)))}"
    return "omit it"


def _known_values(kind: type[Message], steps: Sequence[str]) -> str:
    """Return a fix with the values of the enumeration at a path."""
    for leaf in _leaves(_hint_at(kind, steps)):
        if values := [*leaf] if isinstance(leaf, type) and issubclass(leaf, Enum) else get_args(leaf):
            return f"send one of {', '.join(map(str, values))}"
    return "send a value of the schema"


def _wrong_name(hint: Any, values: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the declared type of a map's names, and the first name beyond its bounds."""
    kind = next(get_args(leaf)[0] for leaf in _leaves(hint) if get_origin(leaf) is dict)
    for name in values:
        try:
            msgspec.convert(name, kind)
        except msgspec.ValidationError:
            return kind, name
    return kind, ""


def _with_key(steps: list[str], kind: type[Message], sent: Any) -> list[str]:
    """Return a path with the key of the map's value that is wrong; the path of the map if all its values are right."""
    before, after = steps[: steps.index(_ANY_KEY)], steps[steps.index(_ANY_KEY) + 1 :]
    values = _value_at(sent, before)
    for leaf in (leaf for leaf in _leaves(_hint_at(kind, before)) if get_origin(leaf) is dict):
        for name, value in values.items() if isinstance(values, Mapping) else ():
            try:
                msgspec.convert(value, get_args(leaf)[1], dec_hook=_read_custom)
            except (msgspec.ValidationError, UnicodeEncodeError):
                return [*before, name, *after]
    return before
