"""The gRPC door: bytes in, the data plane, a message out. Holds no rule.

The servicer's methods take raw bytes, so that a malformed message is refused by this door and not by grpc. The plane is looked up at
each request, since it is made after the door is registered.
"""

from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from services.contracts import recommend_pb2 as pb
from services.contracts.access import Scope
from services.contracts.recommend import MAX_DEADLINE_MS
from services.errors import InvalidRequest
from services.gateway.access.authorize import Access, OpenAccess
from services.gateway.call.headers import Call, deadline_ms_from, edge_mark_from
from services.gateway.data_plane import DataPlane
from services.gateway.grpc.answers import DOOR, GrpcContext, Handler, do_nothing, guarded, traced
from services.gateway.grpc.schema import (
    format_receipt,
    format_recommendation,
    parse_events,
    parse_message,
    parse_recommend,
    request_id_of,
)
from services.observability.tracing import Tracing

SERVICE = "tailrace.v1.Recommender"


class RpcDoor:
    """The servicer of `tailrace.v1.Recommender` and of `grpc.health.v1.Health`'s Check."""

    def __init__(
        self,
        plane: Callable[[], DataPlane],
        max_body_bytes: int,
        access: Access | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """Make the door; without `access` every call is admitted, without `tracing` nothing is traced."""
        self._tracing = tracing or Tracing()
        self._access = access or OpenAccess()
        self._plane = plane
        self._max_body_bytes = max_body_bytes

    async def Recommend(self, request: bytes, context: GrpcContext) -> pb.RecommendResponse:
        """Recommend items to a user, before the deadline."""
        plane = self._plane()

        async def handle(call: Call, headers: dict[str, str]) -> pb.RecommendResponse:
            arrival = plane.edge.arrival(edge_mark_from(headers), DOOR)
            try:
                deadline_ms = deadline_ms_from(headers, MAX_DEADLINE_MS)
                message = parse_recommend(request, self._max_body_bytes, call.request_id, deadline_ms)
            except InvalidRequest:
                call.request_id = request_id_of(request) or call.request_id
                raise
            call.request_id = message.request_id
            return format_recommendation(await plane.recommend(message, arrival, DOOR, call.admitted))

        refused = plane.recommend_refused
        answering = guarded(
            context, handle, pb.RecommendResponse(), refused, access=self._access, scope=Scope.RECOMMEND
        )
        return await traced(self._tracing, context, f"{SERVICE}/Recommend", answering)

    async def RecordEvents(self, request: bytes, context: GrpcContext) -> pb.RecordEventsResponse:
        """Record what users did; answers OK only when the broker has every event."""
        plane = self._plane()

        async def handle(call: Call, _: dict[str, str]) -> pb.RecordEventsResponse:
            drafts = parse_events(request, self._max_body_bytes, plane.max_events_per_request)
            recorded = await plane.record(drafts, DOOR, call.request_id)
            return pb.RecordEventsResponse(
                accepted=len(recorded.event_ids),
                event_ids=recorded.event_ids,
                unknown_items=recorded.unknown_items,
            )

        refused = plane.events_refused
        answering = guarded(
            context, handle, pb.RecordEventsResponse(), refused, access=self._access, scope=Scope.EVENTS
        )
        return await traced(self._tracing, context, f"{SERVICE}/RecordEvents", answering)

    async def EraseUser(self, request: bytes, context: GrpcContext) -> pb.ErasureReceipt:
        """Erase a user; answers OK when the broker has the erasure."""

        async def handle(call: Call, _: dict[str, str]) -> pb.ErasureReceipt:
            message = parse_message(pb.EraseUserRequest, request, self._max_body_bytes)
            return format_receipt(await self._plane().users.erase(message.user_id, DOOR, call.request_id))

        return await self._about_users(context, "EraseUser", handle)

    async def GetErasure(self, request: bytes, context: GrpcContext) -> pb.ErasureReceipt:
        """Return the receipt of an erasure."""

        async def handle(_call: Call, _: dict[str, str]) -> pb.ErasureReceipt:
            message = parse_message(pb.GetErasureRequest, request, self._max_body_bytes)
            return format_receipt(await self._plane().users.receipt(message.erasure_id))

        return await self._about_users(context, "GetErasure", handle)

    async def _about_users(
        self, context: GrpcContext, act: str, handle: Handler[pb.ErasureReceipt]
    ) -> pb.ErasureReceipt:
        """Answer an audited call of the scope `erase`."""
        return await guarded(
            context, handle, pb.ErasureReceipt(), do_nothing, access=self._access, scope=Scope.ERASE, audited_as=act
        )

    async def Check(self, request: Any, context: GrpcContext) -> Any:
        """Report whether recommendations can be answered; the server and its one service have the same health."""
        if request.service not in {"", SERVICE}:
            context.set_code(grpc.StatusCode.NOT_FOUND)
            context.set_details(f"no service {request.service}")
            return health_pb2.HealthCheckResponse()
        is_ready = self._plane().is_ready()
        status = health_pb2.HealthCheckResponse
        return status(status=status.SERVING if is_ready else status.NOT_SERVING)


def add_recommender_to_server(servicer: Any, server: Any) -> None:
    """Register the service, its methods taking raw bytes; named in Ray Serve's `grpc_servicer_functions`."""
    handlers = {
        "Recommend": grpc.unary_unary_rpc_method_handler(
            servicer.Recommend, None, pb.RecommendResponse.SerializeToString
        ),
        "RecordEvents": grpc.unary_unary_rpc_method_handler(
            servicer.RecordEvents, None, pb.RecordEventsResponse.SerializeToString
        ),
        "EraseUser": grpc.unary_unary_rpc_method_handler(servicer.EraseUser, None, pb.ErasureReceipt.SerializeToString),
        "GetErasure": grpc.unary_unary_rpc_method_handler(
            servicer.GetErasure, None, pb.ErasureReceipt.SerializeToString
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_registered_method_handlers(SERVICE, handlers)
