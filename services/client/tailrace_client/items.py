"""The calls on items of the live catalogue, the same over both doors."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tailrace_client.values import TEXT, checked, refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueItem:
    """The stated fields of an item. A title or categories of None come from the live bundle.

    `attributes` maps names to texts, lists of texts, numbers and flags. The item may be shown while it is `available`,
    from `published_ms` until `expires_ms` (Unix milliseconds).
    """

    item_id: str
    title: str | None = None
    categories: tuple[str, ...] | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    available: bool = True
    published_ms: int | None = None
    expires_ms: int | None = None
    value: float | None = None
    num_attempts: int = 1

    def fields(self) -> dict[str, Any]:
        """Return the stated fields as plain values, with the id."""
        stated = {name: getattr(self, name) for name in self.__slots__ if name != "num_attempts"}
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in stated.items()}
        plain["attributes"] = {
            name: list(value) if isinstance(value, tuple) else value for name, value in self.attributes.items()
        }
        return {name: value for name, value in plain.items() if value is not None}


@dataclass(frozen=True, slots=True)
class ItemRefusal:
    """Why the server refused one of many items."""

    item_id: str
    field: str
    message: str
    fix: str


@dataclass(frozen=True, slots=True)
class ItemsPut:
    """The number of items that the broker has acknowledged, and the refused items."""

    accepted: int
    refused: tuple[ItemRefusal, ...] = ()
    num_attempts: int = 1


@dataclass(frozen=True, slots=True)
class ItemDeleted:
    """The broker has acknowledged the deletion."""

    num_attempts: int = 1


def put_fields(items: CatalogueItem | Iterable[CatalogueItem]) -> dict[str, Any]:
    """Return the fields of the call. Raises TailraceError for a wrong value."""
    listed = [items] if isinstance(items, CatalogueItem) else list(items)
    for index, item in enumerate(listed):
        if not isinstance(item, CatalogueItem):
            raise refusal(
                f"items[{index}]", f"wrong type: {type(item).__name__}", "send a CatalogueItem, or a list of them"
            )
        checked(f"items[{index}].item_id", item.item_id, TEXT)
    return {"items": [item.fields() for item in listed]}


def message_of(method: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's fields in the form of the gRPC message: texts by kind, and removed fields of a patch by path."""
    if method == "PutItems":
        return {"items": [_message(item) for item in fields["items"]]}
    if method == "DeleteItems":
        return {"item_ids": [fields["item_id"]]}
    if method != "PatchItem":
        return dict(fields)
    attributes = fields.get("attributes") or {}
    cleared = [name for name, value in fields.items() if value is None]
    cleared += [f"attributes.{name}" for name, value in attributes.items() if value is None]
    kept = {name: value for name, value in fields.items() if value is not None}
    kept["attributes"] = {name: value for name, value in attributes.items() if value is not None}
    return {"changes": _message(kept), "clear": cleared}


def _message(item: Mapping[str, Any]) -> dict[str, Any]:
    message = dict(item)
    if (categories := message.get("categories")) is not None:
        message["categories"] = {"texts": list(categories)}
    message["attributes"] = {name: _value(value) for name, value in message.get("attributes", {}).items()}
    return message


def _value(value: Any) -> dict[str, Any]:
    match value:
        case bool():
            return {"flag": value}
        case str():
            return {"text": value}
        case list() | tuple():
            return {"texts": {"texts": list(value)}}
        case _:
            return {"number": value}
