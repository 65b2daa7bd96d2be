"""The gRPC door: bytes in, the data plane, a message out. Holds no rule.

The methods take raw bytes, so that this door and not grpc rejects a malformed message. The plane is looked up at each
request, since it is created after the door is registered.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from services.contracts import recommend_pb2 as pb
from services.contracts.assignment import AssignResponse
from services.contracts.batch import check_batch_size
from services.contracts.erasure import ReceiptBody
from services.contracts.events import RecordEventsResponse
from services.contracts.items import ItemState, PutOutcomesBody
from services.contracts.protobuf import message_of, parse_strictly
from services.contracts.recommend import MAX_DEADLINE_MS, Recommendation, RecommendRequest
from services.errors import InvalidRequest
from services.gateway.access.authorize import OpenAccess
from services.gateway.call.guard import Access, OnError
from services.gateway.call.headers import Call, batch_size_from, deadline_ms_from, edge_mark_from
from services.gateway.call.operation import Operation
from services.gateway.call.operations import (
    ASSIGNMENT,
    DELETE_ITEM,
    ERASE_USER,
    ERASURE,
    GET_ITEM,
    METHODS,
    PATCH_ITEM,
    POPULAR,
    PUT_ITEMS,
    RECOMMEND,
    RECOMMEND_BATCH,
    RECORD_EVENTS,
    RPCS,
    SEARCH,
    SIMILAR_ITEMS,
)
from services.gateway.data_plane import DataPlane
from services.gateway.grpc import items
from services.gateway.grpc.answers import DOOR, SERVICE, GrpcContext, guarded, method_of, traced
from services.gateway.grpc.schema import (
    format_batch,
    parse_assign,
    parse_batch,
    parse_events,
    parse_popular,
    parse_recommend,
    parse_search,
    parse_similar,
    request_id_of,
)
from services.gateway.tenant_plane import TenantPlane
from services.observability.tracing import Tracing

Method = Callable[[bytes, Call, dict[str, str]], Awaitable[Any]]
"""Answers an admitted call, given its message and metadata, with a message of the contract or of protobuf."""
Parse = Callable[[bytes, int, str, int | None], RecommendRequest]


class RpcDoor:
    """The servicer of `tailrace.v1.Recommender`, with its methods as attributes, and of `grpc.health.v1.Health`."""

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
        self._max_bytes = max_body_bytes
        methods: dict[str, Method] = {
            RECOMMEND.name: partial(self._ranked, parse_recommend, pb.RecommendRequest),
            RECOMMEND_BATCH.name: self._recommend_batch,
            SIMILAR_ITEMS.name: partial(self._ranked, parse_similar, pb.SimilarItemsRequest),
            POPULAR.name: partial(self._ranked, parse_popular, pb.PopularRequest),
            SEARCH.name: partial(self._ranked, parse_search, pb.SearchRequest),
            ASSIGNMENT.name: self._assign,
            RECORD_EVENTS.name: self._record,
            ERASE_USER.name: self._erase,
            ERASURE.name: self._erasure,
            PUT_ITEMS.name: self._put_items,
            PATCH_ITEM.name: self._patch_item,
            GET_ITEM.name: self._get_item,
            DELETE_ITEM.name: self._delete_items,
        }
        refused = {
            **dict.fromkeys(
                (operation.name for operation in (RECOMMEND, RECOMMEND_BATCH, SIMILAR_ITEMS, POPULAR, SEARCH)),
                self._recommend_refused,
            ),
            RECORD_EVENTS.name: self._events_refused,
        }
        for operation in RPCS:
            answer = partial(self._answer, operation, methods[operation.name], refused.get(operation.name))
            setattr(self, method_of(operation).rpartition("/")[2], answer)

    async def _answer(
        self, operation: Operation, method: Method, refused: OnError | None, request: bytes, context: GrpcContext
    ) -> Message:
        rpc = operation.rpc
        assert rpc is not None, "the gRPC door serves operations with a method"

        async def handle(call: Call, headers: dict[str, str]) -> Message:
            answer = await method(request, call, headers)
            return answer if isinstance(answer, Message) else message_of(rpc.answer, answer)

        answering = guarded(operation, context, handle, rpc.answer(), self._access, refused)
        if not operation.is_traced:
            return await answering
        return await traced(self._tracing, context, method_of(operation), answering)

    def _recommend_refused(self, call: Call, door: str, code: str, message: str) -> None:
        self._plane().recommend_refused(door, code, message, call.request_id, call.tenant)

    def _events_refused(self, call: Call, door: str, code: str, message: str) -> None:
        self._plane().events_refused(door, code, message, call.request_id)

    async def _ranked(
        self, parse: Parse, kind: type[Message], request: bytes, call: Call, headers: dict[str, str]
    ) -> Recommendation:
        plane = self._plane()
        arrival = plane.edge.arrival(edge_mark_from(headers), DOOR)
        try:
            deadline_ms = deadline_ms_from(headers, MAX_DEADLINE_MS)
            sent = await plane.reading.read(request, parse, request, self._max_bytes, call.request_id, deadline_ms)
        except InvalidRequest:
            sent_id: str | None = await plane.reading.read(request, request_id_of, request, kind)
            call.request_id = sent_id or call.request_id
            raise
        call.request_id = sent.request_id
        return await TenantPlane(plane, call.admitted).recommend(sent, arrival, DOOR)

    async def _recommend_batch(self, request: bytes, call: Call, headers: dict[str, str]) -> pb.RecommendBatchResponse:
        plane = self._plane()
        arrival = plane.edge.arrival(edge_mark_from(headers), DOOR)
        deadline_ms = deadline_ms_from(headers, MAX_DEADLINE_MS)
        entries = await plane.reading.read(request, parse_batch, request, self._max_bytes, call.request_id, deadline_ms)
        check_batch_size(len(entries), batch_size_from(headers))
        await call.charge(len(entries), "requests", "requests")
        answers = await TenantPlane(plane, call.admitted).recommend_batch(entries, arrival, DOOR)
        return await plane.reading.run(None, format_batch, answers)

    async def _assign(self, request: bytes, call: Call, _: dict[str, str]) -> AssignResponse:
        return TenantPlane(self._plane(), call.admitted).assign(parse_assign(request, self._max_bytes))

    async def _record(self, request: bytes, call: Call, _: dict[str, str]) -> RecordEventsResponse:
        plane = self._plane()
        events = await plane.reading.read(request, parse_events, request, self._max_bytes, plane.max_events_per_request)
        return await TenantPlane(plane, call.admitted).record(events, DOOR, call.request_id)

    async def _erase(self, request: bytes, call: Call, _: dict[str, str]) -> ReceiptBody:
        message = parse_strictly(pb.EraseUserRequest, request, self._max_bytes)
        plane = TenantPlane(self._plane(), call.admitted)
        return ReceiptBody.of(await plane.erase(message.user_id, DOOR, call.request_id))

    async def _erasure(self, request: bytes, call: Call, _: dict[str, str]) -> ReceiptBody:
        message = parse_strictly(pb.GetErasureRequest, request, self._max_bytes)
        return ReceiptBody.of(await TenantPlane(self._plane(), call.admitted).receipt(message.erasure_id))

    async def _put_items(self, request: bytes, call: Call, _: dict[str, str]) -> PutOutcomesBody:
        plane = self._plane()
        drafts = await plane.reading.read(request, items.parse_put, request, self._max_bytes)
        return PutOutcomesBody.of(await TenantPlane(plane, call.admitted).items.put(drafts))

    async def _patch_item(self, request: bytes, call: Call, _: dict[str, str]) -> ItemState:
        plane = self._plane()
        patch = await plane.reading.read(request, items.parse_patch, request, self._max_bytes)
        return await TenantPlane(plane, call.admitted).items.patch(*patch)

    async def _get_item(self, request: bytes, call: Call, _: dict[str, str]) -> ItemState:
        message = parse_strictly(pb.GetItemRequest, request, self._max_bytes)
        return await TenantPlane(self._plane(), call.admitted).items.get(message.item_id)

    async def _delete_items(self, request: bytes, call: Call, _: dict[str, str]) -> dict[str, int]:
        item_ids = list(parse_strictly(pb.DeleteItemsRequest, request, self._max_bytes).item_ids)
        await TenantPlane(self._plane(), call.admitted).items.delete(item_ids)
        return {"deleted": len(item_ids)}

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
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(getattr(servicer, name), None, rpc.answer.SerializeToString)
        for name, rpc in METHODS.items()
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_registered_method_handlers(SERVICE, handlers)
