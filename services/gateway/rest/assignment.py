"""The REST door's assignment call: versions and variants by user."""

from collections.abc import Callable
from dataclasses import asdict

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from services.contracts.access import Scope
from services.contracts.assignment import AssignRequest
from services.gateway.call.headers import Call
from services.gateway.call.http import HttpApp, json_response
from services.gateway.call.operation import Operation, Parameter, json_answer
from services.gateway.data_plane import DataPlane
from services.gateway.rest.operations import REST_ERRORS
from services.gateway.rest.schema import ID_SCHEMA, Body, parse_query

_ID = {"type": "string", **ID_SCHEMA}


class SurfaceAssignmentBody(Body):
    """What applies on one surface."""

    surface: str | None = Field(description="null: requests that name none")
    name: str = Field(description="The model name")
    bundle_version: str | None = Field(description="The version that answers; null: nothing is live")
    is_canary: bool = Field(description="Whether that is the candidate of a release under way")
    variants: dict[str, str] = Field(description="The variant by experiment", examples=[{"fresher": "control"}])


class AssignedBody(Body):
    """What a user, or a visitor's session, gets now."""

    surfaces: list[SurfaceAssignmentBody] = Field(description="All of them, first that of requests which name none")


ASSIGNMENT = Operation(
    name="assignment",
    method="GET",
    path="/v1/assignment",
    summary="Say which version and variants a user, or a visitor's session, gets on each surface",
    scope=Scope.RECOMMEND,
    errors=REST_ERRORS,
    parameters=(
        Parameter(name="user_id", where="query", schema=_ID, description="The user; one of the two is needed"),
        Parameter(
            name="session_id", where="query", schema=_ID, description="A visitor's session; a user goes before it"
        ),
    ),
    answers=json_answer(AssignedBody),
)


def add_assignment(app: HttpApp, plane: Callable[[], DataPlane]) -> None:
    """Add the operation to the app."""

    async def assignment(http: Request, _: Call) -> Response:
        sent = parse_query(http.query_params.multi_items(), ("user_id", "session_id"))
        return json_response(asdict(plane().assign(AssignRequest(**sent))))

    app.serve(ASSIGNMENT, assignment)
