"""The REST door's calls about users: their data, erasure and its receipt.

Paths name users, so neither logs nor audit lines show them.
"""

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from services.contracts.access import Scope
from services.contracts.erasure import ReceiptBody, UserDataBody
from services.contracts.message import MAX_ID_CHARS, PRINTABLE
from services.errors import ErrorKind
from services.gateway.call.headers import Call
from services.gateway.call.http import DOOR, HttpApp, json_response
from services.gateway.call.operation import JSON, Answer, Operation, Parameter, json_answer
from services.gateway.data_plane import DataPlane
from services.gateway.rest.operations import REST_ERRORS

_ID = {"type": "string", "minLength": 1, "maxLength": MAX_ID_CHARS, "pattern": PRINTABLE}
_USER_ID = Parameter(name="user_id", where="path", schema=_ID, description="The user")


ERASE_USER = Operation(
    name="eraseUser",
    method="DELETE",
    path="/v1/users/{user_id}",
    summary="Erase a user: what the broker has of them by now leaves every store, what comes after begins a new history",
    scope=Scope.ERASE,
    errors=REST_ERRORS,
    kinds=frozenset({ErrorKind.OVERLOADED, ErrorKind.UNAVAILABLE}),
    parameters=(_USER_ID,),
    answers={202: Answer("Accepted; the receipt is kept for 90 days", {JSON: ReceiptBody})},
    is_audited=True,
    is_private=True,
)
ERASURE = Operation(
    name="erasure",
    method="GET",
    path="/v1/erasures/{erasure_id}",
    summary="Return the receipt of an erasure",
    scope=Scope.ERASE,
    errors=REST_ERRORS,
    kinds=frozenset({ErrorKind.NOT_FOUND, ErrorKind.UNAVAILABLE}),
    parameters=(Parameter(name="erasure_id", where="path", schema=_ID, description="Of the erasure's answer"),),
    answers=json_answer(ReceiptBody),
    is_audited=True,
)


USER_DATA = Operation(
    name="userData",
    method="GET",
    path="/v1/users/{user_id}/data",
    summary="Return all that is kept of a user",
    scope=Scope.ERASE,
    errors=REST_ERRORS,
    kinds=frozenset({ErrorKind.OVERLOADED, ErrorKind.UNAVAILABLE}),
    parameters=(_USER_ID,),
    answers=json_answer(UserDataBody),
    is_audited=True,
    is_private=True,
)


def add_users(app: HttpApp, plane: Callable[[], DataPlane]) -> None:
    """Add the operations to the REST door's app. `plane` returns the running data plane."""

    async def erase(http: Request, call: Call) -> Response:
        receipt = await plane().users.erase(http.path_params["user_id"], DOOR, call.request_id)
        return json_response(ReceiptBody.of(receipt), 202)

    async def erasure(http: Request, _: Call) -> Response:
        return json_response(ReceiptBody.of(await plane().users.receipt(http.path_params["erasure_id"])))

    async def data(http: Request, _: Call) -> Response:
        return json_response(await plane().export(http.path_params["user_id"]))

    app.serve(ERASE_USER, erase)
    app.serve(USER_DATA, data)
    app.serve(ERASURE, erasure)
