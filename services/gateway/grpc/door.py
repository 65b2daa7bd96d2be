"""The gRPC door: bytes in, the data plane, a message out. Holds no rule.

The servicer's methods take raw bytes, so that this door and not grpc refuses a malformed message. The plane is looked
up at each request, since it is created after the door is registered.
"""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from services.contracts import recommend_pb2 as pb
from services.contracts.access import Scope
from services.contracts.batch import check_batch_size
from services.contracts.protobuf import message_of, parse_strictly
from services.contracts.recommend import MAX_DEADLINE_MS, RecommendRequest
from services.errors import InvalidRequest
from services.gateway.access.authorize import Access, OpenAccess
from services.gateway.call.headers import Call, batch_size_from, deadline_ms_from, edge_mark_from
from services.gateway.data_plane import DataPlane
from services.gateway.grpc import items
from services.gateway.grpc.answers import DOOR, GrpcContext, Handler, guarded, traced
from services.gateway.grpc.schema import (
    format_assigned,
    format_batch,
    format_receipt,
    format_recommendation,
    parse_assign,
    parse_batch,
    parse_events,
    parse_popular,
    parse_recommend,
    parse_similar,
    request_id_of,
)
from services.observability.tracing import Tracing

SERVICE = "tailrace.v1.Recommender"
_ITEM_ANSWERS: dict[str, type[Message]] = {
    "PutItems": pb.PutItemsResponse,
    "PatchItem": pb.CatalogueItem,
    "GetItem": pb.CatalogueItem,
    "DeleteItems": pb.DeleteItemsResponse,
}
M = TypeVar("M", bound=Message)


class RpcDoor:
    """The servicer of `tailrace.v1.Recommender` and of `grpc.health.v1.Health`'s Check."""

    def __init__(
        self,
        plane: Callable[[], DataPlane],
        max_body_bytes: int,
        access: Access | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """Without `access` every call is admitted; without `tracing` no call is traced."""
        self._tracing = tracing or Tracing()
        self._access = access or OpenAccess()
        self._plane = plane
        self._max_body_bytes = max_body_bytes

    async def Recommend(self, request: bytes, context: GrpcContext) -> pb.RecommendResponse:
        """Recommend items to a user, before the deadline."""
        return await self._ranked("Recommend", request, context, parse_recommend, pb.RecommendRequest)

    async def SimilarItems(self, request: bytes, context: GrpcContext) -> pb.RecommendResponse:
        """Return items similar to one item, or to the items of a cart."""
        return await self._ranked("SimilarItems", request, context, parse_similar, pb.SimilarItemsRequest)

    async def Popular(self, request: bytes, context: GrpcContext) -> pb.RecommendResponse:
        """Return popular items, by window and category."""
        return await self._ranked("Popular", request, context, parse_popular, pb.PopularRequest)

    async def RecommendBatch(self, request: bytes, context: GrpcContext) -> pb.RecommendBatchResponse:
        """Recommend items to several users, under one deadline."""
        plane = self._plane()

        async def handle(call: Call, headers: dict[str, str]) -> pb.RecommendBatchResponse:
            arrival = plane.edge.arrival(edge_mark_from(headers), DOOR)
            deadline_ms = deadline_ms_from(headers, MAX_DEADLINE_MS)
            entries = await plane.reading.read(
                request, parse_batch, request, self._max_body_bytes, call.request_id, deadline_ms
            )
            check_batch_size(len(entries), batch_size_from(headers))
            await call.charge(len(entries), "requests", "requests")
            answers = await plane.recommend_batch(entries, arrival, DOOR, call.admitted)
            return await plane.reading.run(None, format_batch, answers)

        return await self._recommending("RecommendBatch", context, handle, pb.RecommendBatchResponse())

    async def _ranked(
        self,
        method: str,
        request: bytes,
        context: GrpcContext,
        parse: Callable[[bytes, int, str, int | None], RecommendRequest],
        kind: type[Message],
    ) -> pb.RecommendResponse:
        plane = self._plane()

        async def handle(call: Call, headers: dict[str, str]) -> pb.RecommendResponse:
            arrival = plane.edge.arrival(edge_mark_from(headers), DOOR)
            try:
                deadline_ms = deadline_ms_from(headers, MAX_DEADLINE_MS)
                message = await plane.reading.read(
                    request, parse, request, self._max_body_bytes, call.request_id, deadline_ms
                )
            except InvalidRequest:
                sent_id: str | None = await plane.reading.read(request, request_id_of, request, kind)
                call.request_id = sent_id or call.request_id
                raise
            call.request_id = message.request_id
            return format_recommendation(await plane.recommend(message, arrival, DOOR, call.admitted))

        return await self._recommending(method, context, handle, pb.RecommendResponse())

    async def _recommending(
        self, method: str, context: GrpcContext, handle: Callable[[Call, dict[str, str]], Awaitable[M]], empty: M
    ) -> M:
        refused = self._plane().recommend_refused
        answering = guarded(context, handle, empty, refused, access=self._access, scope=Scope.RECOMMEND)
        return await traced(self._tracing, context, f"{SERVICE}/{method}", answering)

    async def Assign(self, request: bytes, context: GrpcContext) -> pb.AssignResponse:
        """Return the version and variants that a user, or a visitor's session, gets on each surface."""

        async def handle(_call: Call, _: dict[str, str]) -> pb.AssignResponse:
            return format_assigned(self._plane().assign(parse_assign(request, self._max_body_bytes)))

        return await guarded(
            context, handle, pb.AssignResponse(), lambda *_: None, access=self._access, scope=Scope.RECOMMEND
        )

    async def RecordEvents(self, request: bytes, context: GrpcContext) -> pb.RecordEventsResponse:
        """Record events; answers OK only when the broker has every event."""
        plane = self._plane()

        async def handle(call: Call, _: dict[str, str]) -> pb.RecordEventsResponse:
            drafts = await plane.reading.read(
                request, parse_events, request, self._max_body_bytes, plane.max_events_per_request
            )
            recorded = await plane.record(drafts, DOOR, call.request_id)
            return message_of(pb.RecordEventsResponse, recorded)

        refused = plane.events_refused
        answering = guarded(
            context, handle, pb.RecordEventsResponse(), refused, access=self._access, scope=Scope.EVENTS
        )
        return await traced(self._tracing, context, f"{SERVICE}/RecordEvents", answering)

    async def EraseUser(self, request: bytes, context: GrpcContext) -> pb.ErasureReceipt:
        """Erase a user; answers OK when the broker has the erasure."""

        async def handle(call: Call, _: dict[str, str]) -> pb.ErasureReceipt:
            message = parse_strictly(pb.EraseUserRequest, request, self._max_body_bytes)
            return format_receipt(await self._plane().users.erase(message.user_id, DOOR, call.request_id))

        return await self._about_users(context, "EraseUser", handle)

    async def GetErasure(self, request: bytes, context: GrpcContext) -> pb.ErasureReceipt:
        """Return the receipt of an erasure."""

        async def handle(_call: Call, _: dict[str, str]) -> pb.ErasureReceipt:
            message = parse_strictly(pb.GetErasureRequest, request, self._max_body_bytes)
            return format_receipt(await self._plane().users.receipt(message.erasure_id))

        return await self._about_users(context, "GetErasure", handle)

    async def _about_users(
        self, context: GrpcContext, act: str, handle: Handler[pb.ErasureReceipt]
    ) -> pb.ErasureReceipt:
        """Answer an audited call of the scope `erase`."""
        method = f"{SERVICE}/{act}"
        return await guarded(
            context,
            handle,
            pb.ErasureReceipt(),
            lambda *_: None,
            access=self._access,
            scope=Scope.ERASE,
            act=method,
        )

    async def PutItems(self, request: bytes, context: GrpcContext) -> pb.PutItemsResponse:
        """Replace the states of items; an invalid entry is refused individually."""

        async def handle(call: Call, _: dict[str, str]) -> pb.PutItemsResponse:
            plane = self._plane()
            drafts = await plane.reading.read(request, items.parse_put, request, self._max_body_bytes)
            return items.format_outcomes(await plane.items.put(drafts))

        return await self._on_items(context, "PutItems", handle, pb.PutItemsResponse())

    async def PatchItem(self, request: bytes, context: GrpcContext) -> pb.CatalogueItem:
        """Change some fields of an item."""

        async def handle(call: Call, _: dict[str, str]) -> pb.CatalogueItem:
            plane = self._plane()
            patch = await plane.reading.read(request, items.parse_patch, request, self._max_body_bytes)
            return message_of(pb.CatalogueItem, await plane.items.patch(*patch))

        return await self._on_items(context, "PatchItem", handle, pb.CatalogueItem())

    async def GetItem(self, request: bytes, context: GrpcContext) -> pb.CatalogueItem:
        """Return an item as it appears in answers."""

        async def handle(call: Call, _: dict[str, str]) -> pb.CatalogueItem:
            return message_of(pb.CatalogueItem, self._plane().items.get(items.parse_get(request, self._max_body_bytes)))

        return await self._on_items(context, "GetItem", handle, pb.CatalogueItem(), is_audited=False)

    async def DeleteItems(self, request: bytes, context: GrpcContext) -> pb.DeleteItemsResponse:
        """Delete items, also from later bundles."""

        async def handle(call: Call, _: dict[str, str]) -> pb.DeleteItemsResponse:
            item_ids = items.parse_delete(request, self._max_body_bytes)
            await self._plane().items.delete(item_ids)
            return pb.DeleteItemsResponse(deleted=len(item_ids))

        return await self._on_items(context, "DeleteItems", handle, pb.DeleteItemsResponse())

    async def _on_items(
        self,
        context: GrpcContext,
        name: str,
        handle: Callable[[Call, dict[str, str]], Awaitable[M]],
        empty: M,
        *,
        is_audited: bool = True,
    ) -> M:
        method = f"{SERVICE}/{name}"
        answering = guarded(
            context,
            handle,
            empty,
            lambda *_: None,
            access=self._access,
            scope=Scope.ITEMS,
            act=method if is_audited else None,
        )
        return await traced(self._tracing, context, method, answering)

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
    """Register the service, whose methods take raw bytes; named in Ray Serve's `grpc_servicer_functions`."""
    methods: dict[str, type[Message]] = {
        "Recommend": pb.RecommendResponse,
        "RecommendBatch": pb.RecommendBatchResponse,
        "SimilarItems": pb.RecommendResponse,
        "Popular": pb.RecommendResponse,
        "Assign": pb.AssignResponse,
        "RecordEvents": pb.RecordEventsResponse,
        "EraseUser": pb.ErasureReceipt,
        "GetErasure": pb.ErasureReceipt,
    }
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(getattr(servicer, name), None, answer.SerializeToString)
        for name, answer in (methods | _ITEM_ANSWERS).items()
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_registered_method_handlers(SERVICE, handlers)
