"""The state of one item of the live catalogue, in requests and in the topic `items`.

One record of that topic is one item's whole state, a JSON object in UTF-8; its key is the item's id, and a record
without value, a tombstone, deletes the item. Title and categories, if absent, come from the live bundle. Decoding is
strict, as for events.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from services.contracts.message import (
    PRINTABLE,
    Answer,
    Custom,
    Id,
    InvalidField,
    Message,
    check_id,
    convert,
    decode_object,
    text,
)
from services.contracts.tenant import check_stored_id, check_tenant, local, prefix_of, tenant_of
from services.errors import InvalidRequest

MAX_ITEMS_PER_REQUEST = 1_000
MAX_TITLE_CHARS = 1_024
MAX_TEXT_CHARS = 256
MAX_TEXTS = 64
MAX_ATTRIBUTES = 64
MAX_NAME_CHARS = 64
MAX_NAMES = 256
"""Maximum number of attribute names over all items, counted per kind of value: each costs up to 8 bytes an item."""
MIN_TIME_MS, MAX_TIME_MS = 10**10, 253_402_300_799_999
"""From April 1970 to the end of 9999: smaller numbers are most likely seconds."""
RESERVED_NAMES = frozenset(
    {"item_id", "title", "categories", "available", "published_ms", "expires_ms", "value", "popularity"}
)
"""Names reserved by filters and rules, which attributes must not have."""
_COLOURS = {"colour": "red", "sizes": ["s", "m"], "price": 9.5, "new": True}

Text = Annotated[str, text(MAX_TEXT_CHARS)]
Name = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=MAX_NAME_CHARS,
        extra_json_schema={"pattern": PRINTABLE, "not": {"enum": [*sorted(RESERVED_NAMES)]}},
    ),
]
SentValue = Text | Annotated[tuple[Text, ...], Meta(min_length=1, max_length=MAX_TEXTS)] | float | bool
AttributeValue = str | tuple[str, ...] | float | bool
"""A text, several texts, a number or a flag. A list of one text equals that text."""
_StateTimeMs = Annotated[int, Meta(ge=MIN_TIME_MS, le=MAX_TIME_MS)]


_PatchedAttributes = Annotated[
    dict[Name, SentValue | None],
    Meta(
        description="Attributes to change by name; null removes an attribute, other attributes stay",
        max_length=MAX_ATTRIBUTES,
    ),
]


class ItemStateBody(Message, frozen=True):
    """The state of an item as the shop sends it; absent fields have no value, or the bundle's."""

    title: Annotated[
        Annotated[str, text(MAX_TITLE_CHARS)] | None, Meta(description="Absent: as in the live bundle")
    ] = None
    categories: Annotated[
        Annotated[tuple[Text, ...], Meta(max_length=MAX_TEXTS)] | None,
        Meta(description="Absent: as in the live bundle", examples=[["Comedy"]]),
    ] = None
    attributes: Annotated[
        Annotated[dict[Name, SentValue], Meta(max_length=MAX_ATTRIBUTES)] | None,
        Meta(description="Texts, numbers and flags by name, for filters and rules", examples=[_COLOURS]),
    ] = None
    available: Annotated[bool | None, Meta(description="Whether the item may be shown; absent: yes")] = None
    published_ms: Annotated[
        _StateTimeMs | None, Meta(description="Start of the time when the item may be shown, in Unix milliseconds")
    ] = None
    expires_ms: Annotated[
        _StateTimeMs | None, Meta(description="End of the time when the item may be shown, in Unix milliseconds")
    ] = None
    value: Annotated[float | None, Meta(description="The value of a sale, in any unit, for rules")] = None

    def __post_init__(self) -> None:
        """Check texts, numbers and names of attributes. Raises InvalidField."""
        super().__post_init__()
        for name in self.attributes or ():
            if name in RESERVED_NAMES:
                raise InvalidField(f"attributes.{name}", "a name that every item has", "choose another name")


class ItemPatchBody(ItemStateBody, frozen=True):
    """Fields to change; null removes a field or an attribute, other fields stay."""

    attributes: _PatchedAttributes | None = None  # type: ignore[assignment]


class StatedItemBody(ItemStateBody, frozen=True, kw_only=True):
    """An item of the live catalogue."""

    item_id: Id


class ItemEntry(Custom):
    """An entry of many items, which is checked and rejected individually: its id (empty if missing) and its fields.

    An id that is not a string stays among the fields, which `item_from` rejects.
    """

    __slots__ = ("draft",)

    def __init__(self, item_id: str, fields: Mapping[str, Any]) -> None:
        self.draft = item_id, fields

    @classmethod
    def read(cls, plain: Any) -> "ItemEntry":
        """Return the entry of an object. Raises InvalidField."""
        if not isinstance(plain, dict):
            raise InvalidField("", "not an object", "send one JSON object per item")
        item_id = plain.get("item_id", "")
        if not isinstance(item_id, str):
            return cls("", plain)
        return cls(item_id, {name: value for name, value in plain.items() if name != "item_id"})

    @classmethod
    def forms(cls) -> tuple[type[Any], ...]:
        """Return the forms: a rejected entry may be any object."""
        return StatedItemBody, dict


class PutItemsBody(Message, frozen=True):
    """Many items; an invalid entry is rejected individually."""

    items: Annotated[tuple[ItemEntry, ...], Meta(min_length=1, max_length=MAX_ITEMS_PER_REQUEST)]

    @property
    def drafts(self) -> list[tuple[str, Mapping[str, Any]]]:
        return [item.draft for item in self.items]


class ItemError(Answer, frozen=True):
    """Why an entry was rejected."""

    component: ClassVar = "RefusalBody"

    field: str
    message: str
    fix: str


class ItemOutcome(Answer, frozen=True):
    """The outcome of one entry: without an error the broker has acknowledged it."""

    item_id: str
    error: ItemError | None = None

    @classmethod
    def of(cls, item_id: str, error: InvalidRequest | None) -> "ItemOutcome":
        """Return the outcome of an entry."""
        if error is None:
            return cls(item_id)
        return cls(item_id, ItemError(error.field or "", error.problem, error.fix or ""))


class PutOutcomesBody(Answer, frozen=True):
    """The outcome of each entry, in the order sent."""

    accepted: int
    outcomes: tuple[ItemOutcome, ...]

    @classmethod
    def of(cls, outcomes: Sequence[ItemOutcome]) -> "PutOutcomesBody":
        """Return the outcomes with the number of accepted entries."""
        return cls(sum(outcome.error is None for outcome in outcomes), tuple(outcomes))


class ItemState(StatedItemBody, frozen=True, kw_only=True):
    """The state of an item.

    Attributes:
        title: None: from the live bundle, or the id if the bundle lacks the item.
        expires_ms: If before published_ms, the item is never shown.
    """

    attributes: Mapping[str, AttributeValue] = {}  # type: ignore[assignment]
    available: bool = True

    def __post_init__(self) -> None:
        """Check nothing: `item_from` checks what callers send, and other values are our own."""

    @property
    def key(self) -> bytes:
        return self.item_id.encode()

    def fields(self) -> dict[str, Any]:
        """Return the stated fields as plain values, without the id."""
        plain = msgspec.to_builtins(self)
        plain["attributes"] = plain["attributes"] or None
        return {name: plain[name] for name in FIELDS if plain[name] is not None}

    def encode(self) -> bytes:
        """Return the record's value: compact JSON without absent fields."""
        return msgspec.json.encode(self.fields())

    def patched(self, changes: Mapping[str, Any]) -> "ItemState":
        """Return the state after a merge patch (RFC 7396): null removes a field or an attribute.

        Raises InvalidRequest.
        """
        attributes = changes.get("attributes", {})
        if attributes is not None and not isinstance(attributes, Mapping):
            raise InvalidRequest("attributes", "not an object", "send values by name")
        fields = self.fields() | {name: value for name, value in changes.items() if name != "attributes"}
        merged = {} if attributes is None else {**fields.get("attributes", {}), **attributes}
        fields["attributes"] = {name: value for name, value in merged.items() if value is not None}
        return item_from(self.item_id, fields)


class ItemPatch(msgspec.Struct, frozen=True):
    """The header of a `PATCH`'s record, whose value is the whole merged state.

    Attributes:
        changes: The merge patch.
        topic_id: The topic that the sender had read.
        read_until: Offsets by partition: the sender knew the states of all earlier records.
    """

    changes: dict[str, Any]
    topic_id: str
    read_until: dict[int, int]

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, header: bytes) -> "ItemPatch":
        """Read a header. Raises InvalidRequest."""
        try:
            return msgspec.json.decode(header, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InvalidRequest("patch", str(error), "send no header `patch`") from error


FIELDS = ItemStateBody.__struct_fields__
"""The fields of a state, without the id."""


def decode_item(key: bytes | None, value: bytes | None) -> tuple[str, ItemState | None]:
    """Read one record: the item's id, scoped to its tenant, and its state, None for a deletion.

    A tenant's prefix without an item, as the key of a deletion, deletes the tenant's whole catalogue. Raises
    InvalidRequest naming the field.
    """
    try:
        item_id = (key or b"").decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest("key", "not UTF-8", "send the item's id as the record's key") from error
    if value is None and item_id and item_id == prefix_of(tenant_of(item_id)):
        check_tenant(tenant_of(item_id))
        return item_id, None
    check_stored_id("key", item_id)
    if value is None:
        return item_id, None
    fields, own_id = decode_object(value, "value"), local(item_id)
    if fields.pop("item_id", own_id) != own_id:
        raise InvalidRequest("item_id", "differs from the record's key", "omit it, or send the key")
    return item_id, item_from(own_id, fields)


def item_from(item_id: str, fields: Mapping[str, Any]) -> ItemState:
    """Build a state from plain values; null is absent.

    Raises InvalidRequest naming the unknown, mistyped or bad field.
    """
    if not item_id and "item_id" in fields:
        raise InvalidField("item_id", "not a string", "send a string")
    check_id("item_id", item_id)
    sent = convert(ItemStateBody, fields)
    stated = {name: value for name in FIELDS if (value := getattr(sent, name)) is not None}
    attributes = {
        name: value[0] if isinstance(value, tuple) and len(value) == 1 else value
        for name, value in (sent.attributes or {}).items()
    }
    return ItemState(item_id=item_id, **stated | {"attributes": attributes})
