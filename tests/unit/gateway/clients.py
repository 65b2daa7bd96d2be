"""Clients of both doors with one form of reply."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2_grpc

from services.gateway.grpc.door import RpcDoor, add_recommender_to_server


@dataclass
class Reply:
    """A door's reply; `code` is "ok" or the error's kind."""

    code: str
    body: dict[str, Any] = field(default_factory=dict)
    field: str | None = None
    message: str = ""
    retry_after: str | None = None
    request_id: str | None = None


class RestClient:
    """A client of the REST door, in process."""

    name = "rest"

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def recommend(self, body: dict[str, Any], headers: dict[str, str] | None = None) -> Reply:
        """Request a recommendation."""
        return await self._post("/v1/recommendations", body, headers)

    async def record(self, events: list[dict[str, Any]], headers: dict[str, str] | None = None) -> Reply:
        """Record events."""
        return await self._post("/v1/events", {"events": events}, headers)

    async def _post(self, path: str, body: dict[str, Any], headers: dict[str, str] | None) -> Reply:
        """Post and return the reply."""
        answer = await self.http.post(path, content=json.dumps(body), headers=headers)
        return reply_of(answer)


def reply_of(answer: httpx.Response) -> Reply:
    """Return an HTTP answer as a reply."""
    request_id, retry_after = answer.headers.get("x-request-id"), answer.headers.get("retry-after")
    if answer.status_code == 200:
        return Reply("ok", answer.json(), request_id=request_id)
    error = answer.json()["error"]
    return Reply(error["code"], {}, error["field"], error["message"], retry_after, request_id)


class RpcClient:
    """A client of the gRPC door, over a real connection."""

    name = "grpc"

    def __init__(self, channel: grpc.aio.Channel) -> None:
        from services.contracts import recommend_pb2, recommend_pb2_grpc

        self._pb = recommend_pb2
        self.stub = recommend_pb2_grpc.RecommenderStub(channel)
        self.channel = channel

    async def recommend(self, body: dict[str, Any], headers: dict[str, str] | None = None) -> Reply:
        """Request a recommendation."""
        return await self.call(self.stub.Recommend, self._pb.RecommendRequest(**body), headers)

    async def record(self, events: list[dict[str, Any]], headers: dict[str, str] | None = None) -> Reply:
        """Record events."""
        return await self.call(self.stub.RecordEvents, self._pb.RecordEventsRequest(events=events), headers)

    async def call(self, method: Callable[..., Any], message: Any, headers: dict[str, str] | None = None) -> Reply:
        """Call and return the reply."""
        from google.protobuf.json_format import MessageToDict

        call = method(message, metadata=tuple((headers or {}).items()))
        try:
            answer = await call
        except grpc.aio.AioRpcError as error:
            trailers = dict(error.trailing_metadata() or ())
            return _rpc_error(error, trailers)
        trailers = dict(await call.trailing_metadata())
        body = MessageToDict(answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        return Reply("ok", body, request_id=trailers.get("x-request-id"))


@asynccontextmanager
async def rpc_channel(door: RpcDoor) -> AsyncIterator[grpc.aio.Channel]:
    """Serve the gRPC door on a free port with the health service's Check alone, as Ray Serve does; yield a channel to it."""
    server, health = grpc.aio.server(), health_pb2_grpc.HealthServicer()
    health.Check = door.Check  # type: ignore[method-assign]
    add_recommender_to_server(door, server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


_KIND = {
    "INVALID_ARGUMENT": "invalid_request",
    "RESOURCE_EXHAUSTED": "overloaded",
    "UNAVAILABLE": "dependency_away",
    "INTERNAL": "internal",
}


def _rpc_error(error: grpc.aio.AioRpcError, trailers: dict[str, Any]) -> Reply:
    """Return a status as a reply."""
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    broken, place = error_details_pb2.BadRequest(), None
    code = _KIND[error.code().name]
    for detail in status.details:
        if detail.Unpack(broken):
            place = broken.field_violations[0].field
            code = broken.field_violations[0].reason.lower()
    return Reply(code, {}, place, error.details() or "", trailers.get("retry-after"), trailers.get("x-request-id"))
