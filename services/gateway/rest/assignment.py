"""The REST door's assignment call: versions and variants by user."""

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from services.contracts.assignment import AssignRequest
from services.contracts.message import convert
from services.gateway.call.headers import Call
from services.gateway.call.http import HttpApp, json_response
from services.gateway.call.operations import ASSIGNMENT
from services.gateway.data_plane import DataPlane
from services.gateway.rest.schema import parse_query
from services.gateway.tenant_plane import TenantPlane


def add_assignment(app: HttpApp, plane: Callable[[], DataPlane]) -> None:
    """Add the operation to the app."""

    async def assignment(http: Request, call: Call) -> Response:
        sent = parse_query(http.query_params.multi_items(), AssignRequest.__struct_fields__)
        return json_response(TenantPlane(plane(), call.admitted).assign(convert(AssignRequest, sent)))

    app.serve(ASSIGNMENT, assignment)
