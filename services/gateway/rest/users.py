"""The REST door's calls about users: their data, erasure and its receipt.

Paths name users, so neither logs nor audit lines show them.
"""

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from services.contracts.erasure import ReceiptBody
from services.gateway.call.headers import Call
from services.gateway.call.http import DOOR, HttpApp, json_response
from services.gateway.call.operations import ERASE_USER, ERASURE, USER_DATA
from services.gateway.data_plane import DataPlane
from services.gateway.tenant_plane import TenantPlane


def add_users(app: HttpApp, plane: Callable[[], DataPlane]) -> None:
    """Add the operations to the REST door's app. `plane` returns the running data plane."""

    async def erase(http: Request, call: Call) -> Response:
        receipt = await TenantPlane(plane(), call.admitted).erase(http.path_params["user_id"], DOOR, call.request_id)
        return json_response(ReceiptBody.of(receipt), 202)

    async def erasure(http: Request, call: Call) -> Response:
        return json_response(
            ReceiptBody.of(await TenantPlane(plane(), call.admitted).receipt(http.path_params["erasure_id"]))
        )

    async def data(http: Request, call: Call) -> Response:
        return json_response(await TenantPlane(plane(), call.admitted).export(http.path_params["user_id"]))

    app.serve(ERASE_USER, erase)
    app.serve(USER_DATA, data)
    app.serve(ERASURE, erasure)
