"""The REST door's assignment call: versions and variants by user."""

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from services.contracts.access import Scope
from services.contracts.assignment import Assigned, AssignRequest
from services.contracts.message import convert
from services.gateway.call.headers import Call
from services.gateway.call.http import HttpApp, json_response
from services.gateway.call.json_schema import query_parameters
from services.gateway.call.operation import Operation, json_answer
from services.gateway.data_plane import DataPlane
from services.gateway.rest.operations import REST_ERRORS
from services.gateway.rest.schema import parse_query

ASSIGNMENT = Operation(
    name="assignment",
    method="GET",
    path="/v1/assignment",
    summary="Return the version and variants of a user, or of a visitor's session, on each surface",
    scope=Scope.RECOMMEND,
    errors=REST_ERRORS,
    parameters=query_parameters(AssignRequest),
    answers=json_answer(Assigned),
)


def add_assignment(app: HttpApp, plane: Callable[[], DataPlane]) -> None:
    """Add the operation to the app."""

    async def assignment(http: Request, _: Call) -> Response:
        sent = parse_query(http.query_params.multi_items(), AssignRequest.__struct_fields__)
        return json_response(plane().assign(convert(AssignRequest, sent)))

    app.serve(ASSIGNMENT, assignment)
