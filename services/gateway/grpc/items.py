"""Items of the live catalogue at the gRPC door: converts messages to drafts, and states to messages.

The contract checks the values.
"""

from typing import Any

from services.contracts import recommend_pb2 as pb
from services.contracts.items import ItemState
from services.errors import InvalidRequest
from services.gateway.events.items import ItemOutcome
from services.gateway.grpc.schema import parse_strictly

CLEARABLE = ("title", "categories", "attributes", "available", "published_ms", "expires_ms", "value")


def parse_put(body: bytes, max_bytes: int) -> list[tuple[str, dict[str, Any]]]:
    """Read item ids and fields. Raises InvalidRequest or RequestTooLarge."""
    message = parse_strictly(pb.PutItemsRequest, body, max_bytes)
    return [(item.item_id, _draft(f"items[{place}].", item)) for place, item in enumerate(message.items)]


def parse_patch(body: bytes, max_bytes: int) -> tuple[str, dict[str, Any]]:
    """Read an item's id and its changes; None removes a field or an attribute.

    Raises InvalidRequest or RequestTooLarge.
    """
    message = parse_strictly(pb.PatchItemRequest, body, max_bytes)
    changes = _draft("changes.", message.changes)
    attributes: dict[str, Any] = changes.get("attributes", {})
    for place, path in enumerate(message.clear):
        name, dot, attribute = path.partition(".")
        if name not in CLEARABLE or (dot and not (name == "attributes" and attribute)):
            fix = f"send {', '.join(CLEARABLE)} or attributes.NAME"
            raise InvalidRequest(f"clear[{place}]", f"unknown field {path!r:.80}", fix)
        if attribute in attributes if dot else name in changes:
            raise InvalidRequest(f"clear[{place}]", f"{path!r:.80} is in changes too", "send it in one of the two")
    if removed := {path.partition(".")[2]: None for path in message.clear if "." in path}:
        changes["attributes"] = attributes | removed
    return message.changes.item_id, changes | {name: None for name in message.clear if "." not in name}


def parse_get(body: bytes, max_bytes: int) -> str:
    """Read an item's id. Raises InvalidRequest or RequestTooLarge."""
    return parse_strictly(pb.GetItemRequest, body, max_bytes).item_id


def parse_delete(body: bytes, max_bytes: int) -> list[str]:
    """Read item ids. Raises InvalidRequest or RequestTooLarge."""
    return list(parse_strictly(pb.DeleteItemsRequest, body, max_bytes).item_ids)


def format_item(state: ItemState) -> pb.CatalogueItem:
    """Return a state as a message."""
    return pb.CatalogueItem(
        item_id=state.item_id,
        title=state.title,
        categories=None if state.categories is None else pb.Texts(texts=state.categories),
        attributes={name: _attribute(value) for name, value in state.attributes.items()},
        available=state.available,
        published_ms=state.published_ms,
        expires_ms=state.expires_ms,
        value=state.value,
    )


def format_outcomes(outcomes: tuple[ItemOutcome, ...]) -> pb.PutItemsResponse:
    """Return the outcomes of a batch as a message."""
    return pb.PutItemsResponse(
        accepted=sum(one.refusal is None for one in outcomes),
        outcomes=[pb.ItemOutcome(item_id=one.item_id, error=_refusal(one.refusal)) for one in outcomes],
    )


def _refusal(error: InvalidRequest | None) -> pb.ItemRefusal | None:
    return None if error is None else pb.ItemRefusal(field=error.field, message=error.problem, fix=error.fix)


def _draft(place: str, item: pb.CatalogueItem) -> dict[str, Any]:
    """Return the fields that were set."""
    draft: dict[str, Any] = {
        name: getattr(item, name)
        for name in ("title", "available", "published_ms", "expires_ms", "value")
        if item.HasField(name)
    }
    if item.HasField("categories"):
        draft["categories"] = list(item.categories.texts)
    if item.attributes:
        draft["attributes"] = {name: _value(f"{place}attributes.{name}", one) for name, one in item.attributes.items()}
    return draft


def _value(place: str, value: pb.AttributeValue) -> Any:
    kind = value.WhichOneof("value")
    if kind is None:
        raise InvalidRequest(place, "no value", "send a text, texts, a number or a flag")
    return list(value.texts.texts) if kind == "texts" else getattr(value, kind)


def _attribute(value: Any) -> pb.AttributeValue:
    match value:
        case bool():
            return pb.AttributeValue(flag=value)
        case str():
            return pb.AttributeValue(text=value)
        case tuple():
            return pb.AttributeValue(texts=pb.Texts(texts=value))
        case _:
            return pb.AttributeValue(number=value)
