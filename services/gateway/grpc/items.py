"""Items of the live catalogue at the gRPC door: messages to item ids and fields. The contract checks values."""

from collections.abc import Mapping
from typing import Any

from services.contracts import recommend_pb2 as pb
from services.contracts.items import FIELDS, PutItemsBody
from services.contracts.message import convert
from services.contracts.protobuf import parse_strictly, plain_of
from services.errors import InvalidRequest


def parse_put(body: bytes, max_bytes: int) -> list[tuple[str, Mapping[str, Any]]]:
    """Read item ids and fields. Raises InvalidRequest or RequestTooLarge."""
    return convert(PutItemsBody, plain_of(parse_strictly(pb.PutItemsRequest, body, max_bytes))).drafts


def parse_patch(body: bytes, max_bytes: int) -> tuple[str, dict[str, Any]]:
    """Read an item's id and its changes; None removes a field or an attribute.

    Raises InvalidRequest or RequestTooLarge.
    """
    message = plain_of(parse_strictly(pb.PatchItemRequest, body, max_bytes))
    changes, clear = message.get("changes", {}), message.get("clear", ())
    attributes: dict[str, Any] = changes.get("attributes", {})
    _refuse_without_value(attributes)
    for index, path in enumerate(clear):
        name, dot, attribute = path.partition(".")
        if name not in FIELDS or (dot and not (name == "attributes" and attribute)):
            fix = f"send {', '.join(FIELDS)} or attributes.NAME"
            raise InvalidRequest(f"clear[{index}]", f"unknown field {path!r:.80}", fix)
        if attribute in attributes if dot else name in changes:
            raise InvalidRequest(f"clear[{index}]", f"{path!r:.80} is in changes too", "send it in one of the two")
    if removed := {path.partition(".")[2]: None for path in clear if "." in path}:
        changes["attributes"] = attributes | removed
    return changes.pop("item_id", ""), changes | {name: None for name in clear if "." not in name}


def _refuse_without_value(attributes: dict[str, Any]) -> None:
    """Reject an attribute without a value: None would remove it."""
    for name, value in attributes.items():
        if value is None:
            raise InvalidRequest(f"changes.attributes.{name}", "no value", "send a text, texts, a number or a flag")
