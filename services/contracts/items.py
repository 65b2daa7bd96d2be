"""The state of one item of the live catalogue, in requests and in the topic `items`.

One record of that topic is one item's whole state, a JSON object in UTF-8; its key is the item's id, and a record
without value, a tombstone, deletes the item. Title and categories, if absent, come from the live bundle. Decoding is
strict, as for events.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from services.contracts.recommend import check_id
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
_FIELDS = frozenset({"title", "categories", "attributes", "available", "published_ms", "expires_ms", "value"})

AttributeValue = str | tuple[str, ...] | float | bool
"""A text, several texts, a number or a flag. A list of one text equals that text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemState:
    """The state of an item as the shop sends it.

    Attributes:
        title: None: from the live bundle, or the id if the bundle lacks the item.
        categories: None: from the live bundle.
        attributes: Values by name, for filters and rules.
        available: Whether the item may be shown at all.
        published_ms: Unix milliseconds from which it may be shown.
        expires_ms: Unix milliseconds from which it is hidden; if before published_ms, it is never shown.
        value: The value of a sale, in any unit, for rules.
    """

    item_id: str
    title: str | None = None
    categories: tuple[str, ...] | None = None
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    available: bool = True
    published_ms: int | None = None
    expires_ms: int | None = None
    value: float | None = None

    def __post_init__(self) -> None:
        """Check the values. Raises InvalidRequest naming the field."""
        check_id("item_id", self.item_id)
        if self.title is not None:
            _check_text("title", self.title, MAX_TITLE_CHARS)
        if self.categories is not None:
            _check_texts("categories", self.categories)
        if len(self.attributes) > MAX_ATTRIBUTES:
            raise InvalidRequest("attributes", f"{len(self.attributes)} entries", f"send at most {MAX_ATTRIBUTES}")
        for name, value in self.attributes.items():
            _check_attribute(name, value)
        for name in ("published_ms", "expires_ms"):
            _check_time(name, getattr(self, name))
        if self.value is not None and not _is_finite(self.value):
            raise InvalidRequest("value", "not a finite number", "send a finite number")

    @property
    def key(self) -> bytes:
        """The record's key: the item id."""
        return self.item_id.encode()

    def fields(self) -> dict[str, Any]:
        """Return the stated fields as plain values, without the id."""
        present = {
            "title": self.title,
            "categories": None if self.categories is None else list(self.categories),
            "attributes": {
                name: list(value) if isinstance(value, tuple) else value for name, value in self.attributes.items()
            }
            or None,
            "available": self.available,
            "published_ms": self.published_ms,
            "expires_ms": self.expires_ms,
            "value": self.value,
        }
        return {name: value for name, value in present.items() if value is not None}

    def encode(self) -> bytes:
        """Return the record's value: compact JSON without absent fields."""
        return json.dumps(self.fields(), separators=(",", ":"), ensure_ascii=False).encode()

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
        return item_from(self.item_id, {name: value for name, value in fields.items() if value is not None})


def decode_item(key: bytes | None, value: bytes | None) -> tuple[str, ItemState | None]:
    """Read one record: the item's id and state, None for a deletion. Raises InvalidRequest naming the field."""
    try:
        item_id = (key or b"").decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest("key", "not UTF-8", "send the item's id as the record's key") from error
    check_id("key", item_id)
    if value is None:
        return item_id, None
    try:
        fields = json.loads(value)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise InvalidRequest("value", "not JSON", "send one JSON object per record") from error
    if not isinstance(fields, dict):
        raise InvalidRequest("value", "not a JSON object", "send one JSON object per record")
    if fields.pop("item_id", item_id) != item_id:
        raise InvalidRequest("item_id", "another one than the record's key", "leave it out, or send the same")
    return item_id, item_from(item_id, fields)


def item_from(item_id: str, fields: Mapping[str, Any]) -> ItemState:
    """Build a state from parsed JSON; null is absent.

    Raises InvalidRequest naming the unknown, mistyped or bad field.
    """
    for name in fields:
        if name not in _FIELDS:
            raise InvalidRequest(name, "unknown", f"the fields are {', '.join(sorted(_FIELDS))}")
    given = {name: value for name, value in fields.items() if value is not None}
    for name, kind, wanted in (
        ("title", str, "a text"),
        ("categories", list, "a list of texts"),
        ("attributes", Mapping, "an object with values by name"),
        ("available", bool, "true or false"),
    ):
        if name in given and not isinstance(given[name], kind):
            raise InvalidRequest(name, "of a wrong type", f"send {wanted}")
    for name in ("published_ms", "expires_ms"):
        if name in given and (not isinstance(given[name], int) or isinstance(given[name], bool)):
            raise InvalidRequest(name, "not an integer", "send Unix time in milliseconds")
    if "value" in given and not _is_number(given["value"]):
        raise InvalidRequest("value", "not a number", "send a number")
    if "categories" in given:
        given["categories"] = _texts("categories", given["categories"])
    if "attributes" in given:
        given["attributes"] = {name: _attribute(name, value) for name, value in given["attributes"].items()}
    return ItemState(item_id=item_id, **given)


def _attribute(name: str, value: Any) -> AttributeValue:
    place = f"attributes.{name}"
    if isinstance(value, list):
        texts = _texts(place, value)
        return texts[0] if len(texts) == 1 else texts
    if not isinstance(value, str | bool) and not _is_number(value):
        raise InvalidRequest(place, "of a wrong type", "send a text, a list of texts, a number or a flag")
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value) if _is_finite(value) else math.inf  # refused with all other non-finite numbers
    return value  # type: ignore[no-any-return]


def _texts(place: str, values: Iterable[Any]) -> tuple[str, ...]:
    texts = tuple(values)
    for position, text in enumerate(texts):
        if not isinstance(text, str):
            raise InvalidRequest(f"{place}[{position}]", "not a text", "send texts")
    return texts


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_attribute(name: str, value: AttributeValue) -> None:
    if name in RESERVED_NAMES:
        raise InvalidRequest(f"attributes.{name}", "a name that every item has", "choose another name")
    _check_text("attributes", name, MAX_NAME_CHARS)
    place = f"attributes.{name}"
    if isinstance(value, tuple):
        _check_texts(place, value)
        if not value:
            raise InvalidRequest(place, "an empty list", "leave it out, or send at least one text")
    elif isinstance(value, str):
        _check_text(place, value, MAX_TEXT_CHARS)
    elif not _is_finite(value):
        raise InvalidRequest(place, "not a finite number", "send a finite number")


def _check_texts(place: str, texts: tuple[str, ...]) -> None:
    if len(texts) > MAX_TEXTS:
        raise InvalidRequest(place, f"{len(texts)} entries", f"send at most {MAX_TEXTS}")
    for position, text in enumerate(texts):
        _check_text(f"{place}[{position}]", text, MAX_TEXT_CHARS)


def _check_text(place: str, text: str, max_chars: int) -> None:
    if not text:
        raise InvalidRequest(place, "empty", "send at least one character, or leave it out")
    if len(text) > max_chars:
        raise InvalidRequest(place, f"{len(text)} characters long", f"send at most {max_chars}")
    if not text.isprintable():
        raise InvalidRequest(place, "has control characters", "send printable characters only")


def _check_time(name: str, time_ms: int | None) -> None:
    if time_ms is None:
        return
    if not MIN_TIME_MS <= time_ms <= MAX_TIME_MS:
        raise InvalidRequest(
            name, f"{time_ms} is no time up to the year 9999", "send Unix milliseconds: seconds times 1,000"
        )


def _is_finite(value: float) -> bool:
    """Whether a number is finite as a float; JSON integers can be larger than any float."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
