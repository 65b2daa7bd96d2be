"""The REST door's calls about users: their data, erasure and its receipt.

Paths name users, so neither logs nor audit lines show them.
"""

from collections.abc import Callable
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from services.contracts.access import Scope
from services.contracts.erasure import STORE_MEANINGS, ErasureReceipt
from services.errors import ErrorKind
from services.gateway.call.headers import Call
from services.gateway.call.http import DOOR, HttpApp, json_response
from services.gateway.call.operation import JSON, Answer, Operation, Parameter, json_answer
from services.gateway.data_plane import DataPlane
from services.gateway.rest.operations import REST_ERRORS
from services.gateway.rest.schema import ID_SCHEMA, Body, Id

_ID = {"type": "string", **ID_SCHEMA}
_USER_ID = Parameter(name="user_id", where="path", schema=_ID, description="The user")


class ErasedStoreBody(Body):
    """One store of which a user is taken out."""

    store: str = Field(examples=["features"])
    meaning: str = Field(description="What of the user it held")
    done_time_ms: int | None = Field(description="Unix milliseconds; null: not done yet")


class RemainingBody(Body):
    """What an erasure leaves."""

    what: str
    until: str
    until_unix_ms: int | None = Field(description="Null: `until` alone says it")


class ReceiptBody(Body):
    """What became of an erasure. Names no user."""

    erasure_id: Id
    accepted_time_ms: int = Field(description="Unix milliseconds")
    is_done_online: bool = Field(description="No answer depends on the user's past any more")
    is_done: bool = Field(description="Every store is done")
    stores: list[ErasedStoreBody]
    remaining: list[RemainingBody] = Field(description="What is left, and until when")


class UserDataBody(Body):
    """All that is kept of one user."""

    user_id: str
    history: dict[str, Any] | None = Field(description="Null: none")
    shown: list[dict[str, Any]] = Field(description="What the user was shown, as far as it is remembered")
    lists: list[dict[str, Any]] = Field(description="Stored lists, by bundle")
    explanations: list[dict[str, Any]] = Field(description="Of the user's recent requests")
    events: list[dict[str, Any]] | None = Field(description="Of the offline log; null: this gateway does not see it")
    impressions: list[dict[str, Any]] | None = Field(description="As events")


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
        return json_response(format_receipt(receipt), 202)

    async def erasure(http: Request, _: Call) -> Response:
        return json_response(format_receipt(await plane().users.receipt(http.path_params["erasure_id"])))

    async def data(http: Request, _: Call) -> Response:
        return json_response(await plane().export(http.path_params["user_id"]))

    app.serve(ERASE_USER, erase)
    app.serve(USER_DATA, data)
    app.serve(ERASURE, erasure)


def format_receipt(receipt: ErasureReceipt) -> dict[str, Any]:
    """Return a receipt as plain values, ready for JSON."""
    return {
        "erasure_id": receipt.erasure_id,
        "accepted_time_ms": receipt.accepted_time_ms,
        "is_done_online": receipt.is_done_online,
        "is_done": receipt.is_done,
        "stores": [
            {"store": store, "meaning": STORE_MEANINGS[store], "done_time_ms": done}
            for store, done in receipt.stores.items()
        ],
        "remaining": [
            {"what": one.what, "until": one.until, "until_unix_ms": one.until_unix_ms} for one in receipt.remaining
        ],
    }
