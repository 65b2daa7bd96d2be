"""Items of the live catalogue at the REST door: operations, bodies and handlers.

Holds no rule: the contract checks the values.
"""

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from services.contracts.access import Scope
from services.contracts.answers import Status
from services.contracts.items import (
    ItemPatchBody,
    ItemState,
    ItemStateBody,
    PutItemsBody,
    PutOutcomesBody,
    StatedItemBody,
)
from services.contracts.message import MAX_ID_CHARS, PRINTABLE, decode_object
from services.errors import ErrorKind, InvalidRequest
from services.gateway.call.headers import Call
from services.gateway.call.http import HttpApp, json_response, read_body, refuse_query
from services.gateway.call.operation import Operation, Parameter, json_answer
from services.gateway.data_plane import DataPlane
from services.gateway.rest.operations import REST_ERRORS

_COLOURS = {"colour": "red", "sizes": ["s", "m"], "price": 9.5, "new": True}


def _operation(name: str, method: str, summary: str, path: str = "/v1/items/{item_id}", **more: Any) -> Operation:
    schema = {"type": "string", "minLength": 1, "maxLength": MAX_ID_CHARS, "pattern": PRINTABLE}
    parameter = Parameter(name="item_id", where="path", schema=schema, description="The item's id")
    return Operation(
        name=name,
        method=method,
        path=path,
        summary=summary,
        scope=Scope.ITEMS,
        errors=REST_ERRORS,
        parameters=(parameter,) if "{" in path else (),
        is_audited=method != "GET",
        **more,
    )


_WRITES = frozenset({ErrorKind.OVERLOADED, ErrorKind.UNAVAILABLE})
_STATE = {"categories": ["Comedy"], "attributes": _COLOURS, "available": True}

PUT_ITEM = _operation(
    "putItem",
    "PUT",
    "Replace what is stated of an item; answers when the broker has it, and every answer follows within a second",
    kinds=_WRITES,
    bodies=(ItemStateBody,),
    examples=(_STATE, {"available": False}),
    answers=json_answer(StatedItemBody),
)
PATCH_ITEM = _operation(
    "patchItem",
    "PATCH",
    "Change some fields of an item (a JSON merge patch)",
    kinds=_WRITES | {ErrorKind.NOT_FOUND},
    bodies=(ItemPatchBody,),
    examples=({"available": False}, {"attributes": {"price": 8.5}}),
    answers=json_answer(StatedItemBody),
)
GET_ITEM = _operation(
    "getItem",
    "GET",
    "Return an item as it stands in answers",
    kinds=frozenset({ErrorKind.NOT_FOUND}),
    answers=json_answer(StatedItemBody),
)
DELETE_ITEM = _operation(
    "deleteItem",
    "DELETE",
    "Delete an item, from later bundles too",
    kinds=_WRITES,
    answers=json_answer(Status),
)
PUT_ITEMS = _operation(
    "putItems",
    "PUT",
    "Replace what is stated of many items, each with its outcome",
    "/v1/items",
    kinds=_WRITES,
    bodies=(PutItemsBody,),
    examples=({"items": [{"item_id": "242", **_STATE}, {"item_id": "302", "available": False}]},),
    answers=json_answer(PutOutcomesBody),
)


def add_items(app: HttpApp, plane: Callable[[], DataPlane], max_body_bytes: int) -> None:
    """Add the operations to the app."""

    async def fields_of(http: Request) -> dict[str, Any]:
        body = await read_body(http, max_body_bytes)
        refuse_query(http)
        return await plane().reading.read(body, decode_object, body)

    async def put_one(http: Request, _: Call) -> Response:
        item_id = http.path_params["item_id"]
        return json_response(_stated(await plane().items.put_one(item_id, await fields_of(http))))

    async def patch(http: Request, _: Call) -> Response:
        item_id = http.path_params["item_id"]
        return json_response(_stated(await plane().items.patch(item_id, await fields_of(http))))

    async def get(http: Request, _: Call) -> Response:
        return json_response(_stated(plane().items.get(http.path_params["item_id"])))

    async def delete(http: Request, _: Call) -> Response:
        await plane().items.delete([http.path_params["item_id"]])
        return json_response(Status("deleted"))

    async def put(http: Request, _: Call) -> Response:
        outcomes = await plane().items.put(_entries(await fields_of(http)))
        return json_response(PutOutcomesBody.of(outcomes))

    handlers = ((PUT_ITEM, put_one), (PATCH_ITEM, patch), (GET_ITEM, get), (DELETE_ITEM, delete), (PUT_ITEMS, put))
    for operation, handler in handlers:
        app.serve(operation, handler)


def _entries(sent: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the entries of a batch: item ids (empty if missing) and the other fields."""
    for name in sent.keys() - {"items"}:
        raise InvalidRequest(name, "unknown", "send items alone")
    items = sent.get("items")
    if not isinstance(items, list):
        raise InvalidRequest("items", "not a list", 'send {"items": [...]}')
    entries = []
    for place, item in enumerate(items):
        if not isinstance(item, dict):
            raise InvalidRequest(f"items[{place}]", "not an object", "send one JSON object per item")
        item_id = item.pop("item_id", None)
        entries.append((item_id if isinstance(item_id, str) else "", item))
    return entries


def _stated(state: ItemState) -> dict[str, Any]:
    return {"item_id": state.item_id, **state.fields()}
