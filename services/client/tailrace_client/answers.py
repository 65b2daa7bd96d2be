"""Answers: from the plain values of JSON, which both doors give, to the results. Unknown fields are ignored."""

from collections.abc import Callable, Mapping
from typing import Any

from tailrace_client.calls import (
    Assigned,
    BatchAnswers,
    ErasureReceipt,
    Explanation,
    Item,
    Recommendation,
    Recorded,
    SurfaceAssignment,
    Understood,
    UserData,
)
from tailrace_client.items import CatalogueItem, ItemDeleted, ItemRefusal, ItemsPut
from tailrace_client.retry import TailraceError

_READ = frozenset(Recommendation.__slots__) - {"items", "num_attempts", "understood"}


def _recommendation(body: Mapping[str, Any], num_attempts: int) -> Recommendation:
    items = tuple(Item(item["item_id"], item["score"], item["title"], item["source"]) for item in body["items"])
    known = {name: value for name, value in body.items() if name in _READ}
    understood = _understood(body.get("understood"))
    return Recommendation(items=items, num_attempts=num_attempts, understood=understood, **known)


def _understood(body: Mapping[str, Any] | None) -> Understood | None:
    if body is None:
        return None
    terms = {name: tuple(body.get(name, ())) for name in ("must", "must_not", "liked", "relaxed")}
    return Understood(**terms, reader=body.get("reader", ""))


def _batch(body: Mapping[str, Any], num_attempts: int) -> BatchAnswers:
    return BatchAnswers(tuple(_entry(answer, num_attempts) for answer in body["answers"]), num_attempts)


def _entry(entry: Mapping[str, Any], num_attempts: int) -> Recommendation | TailraceError:
    """Return an entry: over gRPC an error or a recommendation, over REST an error or the fields."""
    if (error := entry.get("error")) is None:
        return _recommendation(entry.get("recommendation", entry), num_attempts)
    named = {name: error[name] for name in ("field", "fix", "request_id")}
    return TailraceError(error["code"], error["message"], num_attempts=num_attempts, **named)


def _recorded(body: Mapping[str, Any], num_attempts: int) -> Recorded:
    return Recorded(tuple(body["event_ids"]), num_attempts, tuple(body.get("unknown_items", ())), body["accepted"])


def _assigned(body: Mapping[str, Any], num_attempts: int) -> Assigned:
    return Assigned(tuple(_surface(assignment) for assignment in body["surfaces"]), num_attempts)


def _surface(assignment: Mapping[str, Any]) -> SurfaceAssignment:
    fields = {name: assignment[name] for name in SurfaceAssignment.__slots__}
    return SurfaceAssignment(**fields | {"surface": assignment["surface"] or None})


def _explanation(body: Mapping[str, Any], num_attempts: int) -> Explanation:
    return Explanation(body["request_id"], body["outcome"], tuple(body["sentences"]), body, num_attempts)


def _receipt(body: Mapping[str, Any], num_attempts: int) -> ErasureReceipt:
    return ErasureReceipt(
        erasure_id=body["erasure_id"],
        accepted_time_ms=body["accepted_time_ms"],
        is_done_online=body["is_done_online"],
        is_done=body["is_done"],
        stores={store["store"]: store["done_time_ms"] for store in body["stores"]},
        remaining=tuple(f"{entry['what']}: until {entry['until']}" for entry in body["remaining"]),
        num_attempts=num_attempts,
    )


def _user_data(body: Mapping[str, Any], num_attempts: int) -> UserData:
    return UserData(body["user_id"], body, num_attempts)


def _item(body: Mapping[str, Any], num_attempts: int) -> CatalogueItem:
    known = {name: value for name, value in body.items() if name in CatalogueItem.__slots__ and value is not None}
    if (categories := known.get("categories")) is not None:
        known["categories"] = tuple(categories)
    attributes = known.get("attributes", {}).items()
    known["attributes"] = {name: tuple(value) if isinstance(value, list) else value for name, value in attributes}
    return CatalogueItem(**known, num_attempts=num_attempts)


def _items_put(body: Mapping[str, Any], num_attempts: int) -> ItemsPut:
    rejected = ((outcome["item_id"], outcome["error"]) for outcome in body["outcomes"] if outcome["error"] is not None)
    refusals = (ItemRefusal(item_id, why["field"], why["message"], why["fix"]) for item_id, why in rejected)
    return ItemsPut(body["accepted"], tuple(refusals), num_attempts)


READERS: Mapping[type, Callable[[Any, int], Any]] = {
    Recommendation: _recommendation,
    BatchAnswers: _batch,
    Recorded: _recorded,
    Assigned: _assigned,
    Explanation: _explanation,
    ErasureReceipt: _receipt,
    UserData: _user_data,
    CatalogueItem: _item,
    ItemsPut: _items_put,
    ItemDeleted: lambda _body, num_attempts: ItemDeleted(num_attempts),
}
"""Reads an answer of each type, with the number of attempts."""
