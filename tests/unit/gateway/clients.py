"""Clients of both doors with a common form of reply."""

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote

import grpc
import httpx
from google.protobuf.json_format import MessageToDict, ParseDict
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2_grpc
from starlette.types import ASGIApp

from benchmarks.load.recommender_stub import RecommenderStub
from services.contracts import recommend_pb2
from services.errors import ErrorKind
from services.gateway.call.operations import STATUS as REST_STATUS
from services.gateway.grpc.answers import STATUS as RPC_STATUS
from services.gateway.grpc.door import RpcDoor, add_recommender_to_server

CLIENT_HOST = "192.0.2.7"


@dataclass
class Reply:
    """A door's reply.

    Args:
        code: "ok" or the kind of the error.
        limits: The key's rate-limit headers by short name.
        request_id: From the header or trailer.
        refused_id: The request id in the error.
        parts: The error's fields and, over gRPC, the types of its details.
        sent: The whole error response as text.
    """

    code: str
    body: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, str] = field(default_factory=dict)
    field: str | None = None
    message: str = ""
    retry_after: str | None = None
    request_id: str | None = None
    refused_id: str | None = None
    parts: frozenset[str] = frozenset()
    sent: str = ""


@asynccontextmanager
async def in_process(app: ASGIApp) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of an app in this process."""
    transport = httpx.ASGITransport(app, client=(CLIENT_HOST, 4711))
    async with httpx.AsyncClient(transport=transport, base_url="http://door") as http:
        yield http


class RestClient:
    """A client of the REST door, in process."""

    name = "rest"

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def recommend(self, body: dict[str, Any], headers: dict[str, str] | None = None) -> Reply:
        return await self._post("/v1/recommendations", body, headers)

    async def batch(self, body: dict[str, Any], headers: dict[str, str] | None = None) -> Reply:
        return await self._post("/v1/recommendations:batch", body, headers)

    async def similar(self, item_ids: list[str], body: dict[str, Any], headers: dict[str, str] | None = None) -> Reply:
        """Request similar items."""
        path = f"/v1/items/{quote(item_ids[0], safe='')}/similar"
        return await self._post(path, {**body, "item_ids": item_ids[1:]}, headers)

    async def popular(self, **sent: Any) -> Reply:
        return _reply(await self.http.get("/v1/popular", params={n: v for n, v in sent.items() if v is not None}))

    async def search(self, q: str | None, headers: dict[str, str] | None = None, **sent: Any) -> Reply:
        """Search."""
        query = {} if q is None else {"q": q, **sent}
        return _reply(await self.http.get("/v1/search", params=query, headers=headers))

    async def assignment(self, **unit: str) -> Reply:
        return _reply(await self.http.get("/v1/assignment", params=unit))

    async def record(self, events: list[dict[str, Any]], headers: dict[str, str] | None = None) -> Reply:
        return await self._post("/v1/events", {"events": events}, headers)

    async def _post(self, path: str, body: dict[str, Any], headers: dict[str, str] | None) -> Reply:
        return _reply(await self.http.post(path, content=json.dumps(body), headers=headers))


def _reply(answer: httpx.Response) -> Reply:
    reply = Reply("ok", answer.json(), request_id=answer.headers.get("x-request-id"), limits=_limits(answer.headers))
    if answer.status_code != 200:
        error = reply.body.pop("error")
        reply.code, reply.field, reply.message = error["code"], error["field"], error["message"]
        reply.refused_id, reply.parts = error["request_id"], frozenset(error)
        reply.retry_after = answer.headers.get("retry-after")
        reply.sent = f"{sorted(answer.headers.items())} {answer.text}"
        assert answer.status_code == REST_STATUS[ErrorKind(reply.code)]
    return reply


class RpcClient:
    """A client of the gRPC door, over a real connection."""

    name = "grpc"

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = RecommenderStub(channel)
        self.channel = channel

    async def recommend(self, body: dict[str, Any], headers: dict[str, str] | None = None) -> Reply:
        """Request a recommendation."""
        nested = {name: plain for name, plain in body.items() if isinstance(plain, dict)}
        message = recommend_pb2.RecommendRequest(**{name: body[name] for name in body.keys() - nested.keys()})
        return await self.call(self._stub.Recommend, ParseDict(nested, message), headers)

    async def batch(self, body: dict[str, Any], headers: dict[str, str] | None = None) -> Reply:
        """Request recommendations for several users; answers have REST's form."""
        reply = await self.call(self._stub.RecommendBatch, recommend_pb2.RecommendBatchRequest(**body), headers)
        outcomes = [answer.get("recommendation") or answer for answer in reply.body.get("answers", [])]
        return replace(reply, body={"answers": outcomes})

    async def similar(self, item_ids: list[str], body: dict[str, Any], headers: dict[str, str] | None = None) -> Reply:
        """Request similar items."""
        request = recommend_pb2.RecommendRequest(**body)
        message = recommend_pb2.SimilarItemsRequest(item_ids=item_ids, request=request)
        return await self.call(self._stub.SimilarItems, message, headers)

    async def popular(self, window: str | None = None, category: str | None = None, **sent: Any) -> Reply:
        """Request popular items."""
        filters = recommend_pb2.Filters(categories=[] if category is None else [category])
        request = recommend_pb2.RecommendRequest(filters=filters, **sent)
        return await self.call(self._stub.Popular, recommend_pb2.PopularRequest(window=window, request=request))

    async def search(self, q: str | None, headers: dict[str, str] | None = None, **sent: Any) -> Reply:
        """Search."""
        request = recommend_pb2.RecommendRequest(**sent)
        return await self.call(self._stub.Search, recommend_pb2.SearchRequest(q=q, request=request), headers)

    async def assignment(self, **unit: str) -> Reply:
        """Request the assignment of a user or session; answers have REST's form."""
        reply = await self.call(self._stub.Assign, recommend_pb2.AssignRequest(**unit))
        for surface in reply.body.get("surfaces", []):
            surface["surface"], surface["bundle_version"] = surface["surface"] or None, surface.get("bundle_version")
        return reply

    async def record(self, events: list[dict[str, Any]], headers: dict[str, str] | None = None) -> Reply:
        return await self.call(self._stub.RecordEvents, recommend_pb2.RecordEventsRequest(events=events), headers)

    async def call(self, method: Callable[..., Any], message: Any, headers: dict[str, str] | None = None) -> Reply:
        """Call and return the reply."""
        call = method(message, metadata=tuple((headers or {}).items()))
        try:
            answer = await call
        except grpc.aio.AioRpcError as error:
            return _refused(error, dict(error.trailing_metadata() or ()))
        trailers = dict(await call.trailing_metadata())
        body = MessageToDict(answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        return Reply("ok", body, request_id=trailers.get("x-request-id"), limits=_limits(trailers))


Door = RestClient | RpcClient


@asynccontextmanager
async def rpc_channel(door: RpcDoor) -> AsyncIterator[grpc.aio.Channel]:
    """Serve the gRPC door on a free port with only the health service's Check, as Ray Serve does; yield a channel."""
    server, health = grpc.aio.server(), health_pb2_grpc.HealthServicer()
    health.Check = door.Check  # type: ignore[method-assign]
    add_recommender_to_server(door, server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


def _refused(error: grpc.aio.AioRpcError, trailers: dict[str, Any]) -> Reply:
    """Return a status and its details as a reply."""
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    info, violated, field = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), None
    request = error_details_pb2.RequestInfo()
    for detail in status.details:
        detail.Unpack(info)
        detail.Unpack(request)
        if detail.Unpack(violated):
            field = violated.field_violations[0].field
    code = info.reason.lower()
    assert error.code() is RPC_STATUS[ErrorKind(code)]
    return Reply(
        code,
        field=field,
        message=error.details() or "",
        retry_after=trailers.get("retry-after"),
        request_id=trailers.get("x-request-id"),
        refused_id=request.request_id,
        parts=frozenset(detail.type_url.rpartition("/")[2] for detail in status.details) | frozenset(info.metadata),
        sent=f"{error.details()} {sorted(trailers.items())} {status}",
        limits=_limits(trailers),
    )


def _limits(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.removeprefix("ratelimit-"): value for name, value in headers.items() if name.startswith("ratelimit-")}
