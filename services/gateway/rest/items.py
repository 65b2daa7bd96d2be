"""Items of the live catalogue at the REST door.

Holds no rule: the contract checks the values.
"""

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from services.contracts.answers import Status
from services.contracts.items import ItemState, PutItemsBody, PutOutcomesBody
from services.contracts.message import convert, decode_object
from services.gateway.call.headers import Call
from services.gateway.call.http import HttpApp, json_response, read_body, refuse_query
from services.gateway.call.operations import DELETE_ITEM, GET_ITEM, PATCH_ITEM, PUT_ITEM, PUT_ITEMS
from services.gateway.data_plane import DataPlane
from services.gateway.tenant_plane import TenantPlane


def add_items(app: HttpApp, plane: Callable[[], DataPlane], max_body_bytes: int) -> None:
    """Add the operations to the app."""

    async def fields_of(http: Request) -> dict[str, Any]:
        body = await read_body(http, max_body_bytes)
        refuse_query(http)
        return await plane().reading.read(body, decode_object, body)

    async def put_one(http: Request, call: Call) -> Response:
        item_id = http.path_params["item_id"]
        return json_response(
            _stated(await TenantPlane(plane(), call.admitted).items.put_one(item_id, await fields_of(http)))
        )

    async def patch(http: Request, call: Call) -> Response:
        item_id = http.path_params["item_id"]
        return json_response(
            _stated(await TenantPlane(plane(), call.admitted).items.patch(item_id, await fields_of(http)))
        )

    async def get(http: Request, call: Call) -> Response:
        return json_response(_stated(await TenantPlane(plane(), call.admitted).items.get(http.path_params["item_id"])))

    async def delete(http: Request, call: Call) -> Response:
        await TenantPlane(plane(), call.admitted).items.delete([http.path_params["item_id"]])
        return json_response(Status("deleted"))

    async def put(http: Request, call: Call) -> Response:
        sent = convert(PutItemsBody, await fields_of(http))
        outcomes = await TenantPlane(plane(), call.admitted).items.put(sent.drafts)
        return json_response(PutOutcomesBody.of(outcomes))

    handlers = ((PUT_ITEM, put_one), (PATCH_ITEM, patch), (GET_ITEM, get), (DELETE_ITEM, delete), (PUT_ITEMS, put))
    for operation, handler in handlers:
        app.serve(operation, handler)


def _stated(state: ItemState) -> dict[str, Any]:
    return {"item_id": state.item_id, **state.fields()}
