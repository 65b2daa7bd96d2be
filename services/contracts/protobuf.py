"""Converts protobuf messages to and from plain values and messages, by their descriptors.

Strict: unknown fields are rejected by number. Three forms differ from JSON: a message with one repeated field named
`texts` is a list, a message with one oneof named `value` is the value, and google.protobuf.Value is JSON itself.
"""

from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as Protobuf
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.unknown_fields import UnknownFieldSet

from services.errors import InvalidRequest, RequestTooLarge

P = TypeVar("P", bound=Protobuf)
Reader = Callable[[Any], Any]

_MAX_UNKNOWN_BYTES = 10_000
"""protobuf lists all unknown fields to return the first, which took 0.2 s of the event loop for a body full of unknown
fields."""
_USE_THE_SCHEMA = "use the schema that reflection or recommend.proto gives"
_REPEATED = {"tailrace.v1.Filters", "tailrace.v1.Rules"}
"""Messages that many callers send alike: equal bytes are converted once."""
_MAX_KEPT, _MAX_KEPT_BYTES = 512, 2_048
_JSON_KINDS = {"google.protobuf.Value", "google.protobuf.ListValue", "google.protobuf.Struct"}


def parse_strictly(kind: type[P], body: bytes, max_bytes: int) -> P:
    """Read a message without unknown fields. Raises InvalidRequest or RequestTooLarge."""
    message = parse(kind, body, max_bytes)
    refuse_unknown(message)
    return message


def parse(kind: type[P], body: bytes, max_bytes: int) -> P:
    """Read a message. Raises InvalidRequest or RequestTooLarge."""
    if len(body) > max_bytes:
        raise RequestTooLarge(max_bytes)
    message = kind()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise InvalidRequest("body", f"not a {kind.DESCRIPTOR.name} message", "send the schema's message") from error
    return message


def refuse_unknown(message: Protobuf) -> None:
    """Reject a message with unknown fields.

    Raises InvalidRequest naming the first, or the body if there are too many to list.
    """
    known = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()
    num_bytes = message.ByteSize() - known.ByteSize()
    if num_bytes > _MAX_UNKNOWN_BYTES:
        raise InvalidRequest("body", f"{num_bytes} bytes of unknown fields", _USE_THE_SCHEMA)
    if not num_bytes:
        return
    for path in _unknown_fields(message, ""):
        raise InvalidRequest(path, "unknown", _USE_THE_SCHEMA)


def plain_of(message: Protobuf) -> Any:
    """Return the fields that were set as plain values."""
    return _reader(message.DESCRIPTOR)(message)


def message_of(kind: type[P], value: Any) -> P:
    """Return a message with the attributes of a value, or the entries of a mapping; a null is absent."""
    return _writer(kind.DESCRIPTOR)(value)  # type: ignore[no-any-return]


@cache
def _reader(kind: Descriptor) -> Reader:
    """Return a function from messages of this type to plain values."""
    if kind.full_name in _JSON_KINDS:
        return _json_value
    if (inner := _list_field(kind)) is not None:
        return lambda message: list(getattr(message, inner))
    if (oneof := _value_oneof(kind)) is not None:
        readers = {field.name: _value_reader(field) for field in kind.fields}

        def read_value(message: Any) -> Any:
            name = message.WhichOneof(oneof)
            return None if name is None else readers[name](getattr(message, name))

        return read_value

    by_number: dict[int, Reader] = {}

    def read(message: Any) -> dict[str, Any]:
        plain = {}
        for field, value in message.ListFields():
            reader = by_number.get(field.number)
            if reader is None:  # made at first use, because types may contain themselves
                reader = by_number[field.number] = _field_reader(field)
            plain[field.name] = reader(value)
        return plain

    return read


def _field_reader(field: FieldDescriptor) -> Reader:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        read = _value_reader(field.message_type.fields_by_name["value"])
        return lambda entries: {key: read(value) for key, value in entries.items()}
    read_one = _value_reader(field)
    if not field.is_repeated:
        return read_one
    return list if field.message_type is None else lambda values: [read_one(value) for value in values]


def _value_reader(field: FieldDescriptor) -> Reader:
    if field.message_type is None:
        return _as_it_is
    return _kept_plain if field.message_type.full_name in _REPEATED else _reader(field.message_type)


def _kept_plain(message: Protobuf) -> Any:
    """Return plain values, which later calls share."""
    sent = message.SerializeToString(deterministic=True)
    return plain_of(message) if len(sent) > _MAX_KEPT_BYTES else _plain_of_sent(message.DESCRIPTOR, sent)


@lru_cache(_MAX_KEPT)
def _plain_of_sent(kind: Descriptor, sent: bytes) -> Any:
    return plain_of(GetMessageClass(kind).FromString(sent))


def _as_it_is(value: Any) -> Any:
    return value


def _json_value(value: Any) -> Any:
    """Return the JSON value of a google.protobuf.Value, ListValue or Struct."""
    match value.DESCRIPTOR.name:
        case "ListValue":
            return [_json_value(entry) for entry in value.values]
        case "Struct":
            return {name: _json_value(entry) for name, entry in value.fields.items()}
    kind = value.WhichOneof("kind")
    if kind in ("list_value", "struct_value"):
        return _json_value(getattr(value, kind))
    return None if kind in (None, "null_value") else getattr(value, kind)


@cache
def _writer(kind: Descriptor) -> Callable[[Any], Any]:
    """Return a function from values to messages of this type."""
    make: Any = GetMessageClass(kind)
    if (inner := _list_field(kind)) is not None:
        return lambda values: make(**{inner: values})
    if _value_oneof(kind) is not None:
        return lambda value: make(**{_kind_of(value): _texts_of(value)})
    plain = tuple(field.name for field in kind.fields if field.message_type is None or _is_plain_map(field))
    nested = tuple((field.name, _field_writer(field)) for field in kind.fields if field.name not in plain)

    def write(value: Any) -> Any:
        get = value.get if isinstance(value, dict) else lambda name: getattr(value, name)
        fields = {name: get(name) for name in plain}
        for name, write_field in nested:
            if (inner_value := get(name)) is not None:
                fields[name] = write_field(inner_value)
        return make(**fields)

    return write


def _field_writer(field: FieldDescriptor) -> Callable[[Any], Any]:
    kind: Any = field.message_type
    if kind.GetOptions().map_entry:
        write = _writer(kind.fields_by_name["value"].message_type)
        return lambda entries: {key: write(value) for key, value in entries.items()}
    write = _writer(kind)
    return (lambda values: [write(value) for value in values]) if field.is_repeated else write


def _is_plain_map(field: FieldDescriptor) -> bool:
    kind: Any = field.message_type
    return bool(kind.GetOptions().map_entry) and kind.fields_by_name["value"].message_type is None


def _list_field(kind: Descriptor) -> str | None:
    """Return the name of the repeated field of a message that represents a list."""
    return "texts" if [field.name for field in kind.fields] == ["texts"] else None


def _value_oneof(kind: Descriptor) -> str | None:
    """Return the oneof of a message that represents one value."""
    return "value" if [oneof.name for oneof in kind.oneofs] == ["value"] else None


def _kind_of(value: Any) -> str:
    match value:
        case bool():
            return "flag"
        case str():
            return "text"
        case tuple() | list():
            return "texts"
        case _:
            return "number"


def _texts_of(value: Any) -> Any:
    return {"texts": value} if isinstance(value, tuple | list) else value


def _unknown_fields(message: Protobuf, path: str) -> Iterator[str]:
    """Yield the paths of unknown fields, by number: `filters.#7`."""
    unknown = UnknownFieldSet(message)
    for index in range(len(unknown)):
        yield f"{path}#{unknown[index].field_number}"
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if isinstance(value, Protobuf):
            yield from _unknown_fields(value, f"{path}{field.name}.")
            continue
        if field.message_type.GetOptions().map_entry:
            parts = [(key, part) for key, part in value.items() if isinstance(part, Protobuf)]
        else:
            parts = [*enumerate(value)]
        for key, part in parts:
            yield from _unknown_fields(part, f"{path}{field.name}[{key!r}].")
