"""Callers of both doors: minimal clients for load, and the client that products install for a product's view.

Minimal clients write HTTP/1.1 directly on kept-alive connections, and use grpc.aio on one channel, or HTTP/2 directly.
The product's client takes eight times their processor time over REST, which at hundreds of requests a second the server
under test would lack.
"""

import asyncio
from typing import Any, Self
from urllib.parse import quote

import grpc
import msgspec
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.load.http1 import Http1Channel
from benchmarks.load.http2 import CallAnswer, Http2Channel
from benchmarks.load.open_loop import GRACE_S, RequestOutcome
from benchmarks.load.recommender_stub import RecommenderStub
from services.contracts import recommend_pb2
from tailrace_client import AsyncClient, CallOptions, TailraceError

_NUM_CONNECTIONS = 4
_STATUS_NAMES = {code.value[0]: code.name.lower() for code in grpc.StatusCode}
RequestFields = dict[str, Any]
"""A recommendation request in the fields that both doors share."""


def path_of(kind: str, identifier: str) -> bytes:
    """Return the path of a user or an item, with its ID percent-encoded."""
    return f"/v1/{kind}/{quote(identifier, safe='')}".encode()


class ProductCaller:
    """A product with tailrace_client: requests are retried within their deadline. Late answers count, too."""

    def __init__(self, address: str, key: str) -> None:
        options = CallOptions(network_ms=0.0, grace_ms=1_000 * GRACE_S)
        self.client = AsyncClient(address, api_key=key, options=options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exit: object) -> None:
        await self.client.close()

    async def recommend(self, ask: RequestFields) -> RequestOutcome:
        """Request a recommendation; the outcome includes the number of attempts."""
        try:
            answer = await self.client.recommend(**ask)
        except TailraceError as error:
            return RequestOutcome(is_ok=False, tier="none", reason=error.code, num_attempts=error.num_attempts)
        item_ids = tuple([item.item_id for item in answer.items])
        return RequestOutcome(True, answer.tier, answer.reason, answer.num_attempts, item_ids)


class _Item(msgspec.Struct):
    item_id: str


class _Answer(msgspec.Struct):
    items: tuple[_Item, ...]
    tier: str
    reason: str
    bundle_version: str
    request_id: str


class _Error(msgspec.Struct):
    message: str


class _ErrorAnswer(msgspec.Struct):
    error: _Error


_read_answer = msgspec.json.Decoder(_Answer).decode
_read_error = msgspec.json.Decoder(_ErrorAnswer).decode


class RestClient:
    """HTTP/1.1 with keep-alive; one connection per concurrent request. `key` is an API key, if required."""

    def __init__(self, host: str, port: int, key: str = "") -> None:
        self.address = f"{host}:{port}"
        """HOST:PORT of the door."""
        authorization = f"authorization: Bearer {key}\r\n" if key else ""
        head = f"HTTP/1.1\r\nhost: {self.address}\r\n{authorization}content-type: application/json\r\ncontent-length: "
        self._head = head.encode()
        self._channel = Http1Channel(host, port)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exit: object) -> None:
        await self._channel.close()

    def recommend(self, ask: RequestFields) -> "asyncio.Future[RequestOutcome]":
        """Call POST /v1/recommendations."""
        return self._channel.call(
            self._request(b"POST", b"/v1/recommendations", msgspec.json.encode(ask)), _rest_outcome
        )

    async def nothing(self) -> RequestOutcome:
        """Call GET /healthz."""
        status, _ = await self.call(b"GET", b"/healthz", b"")
        return RequestOutcome(is_ok=status == 200, tier="none", reason=f"http_{status}")

    async def call(self, method: bytes, path: bytes, body: bytes) -> tuple[int, bytes]:
        """Send one request and return (status, body); status 0 if no connection could carry it."""
        return await self._channel.call(self._request(method, path, body), lambda *answer: answer)

    def _request(self, method: bytes, path: bytes, body: bytes) -> bytes:
        return b"%s %s %s%d\r\n\r\n%s" % (method, path, self._head, len(body), body)


def _rest_outcome(status: int, body: bytes) -> RequestOutcome:
    if status == 429:
        return RequestOutcome(is_ok=False, tier="none", reason=f"http_429: {_who_refused(body)}")
    if status != 200:
        return RequestOutcome(is_ok=False, tier="none", reason=f"http_{status}")
    answer = _read_answer(body)
    item_ids = tuple([item.item_id for item in answer.items])
    return RequestOutcome(True, answer.tier, answer.reason, 1, item_ids, answer.bundle_version, answer.request_id)


def _who_refused(body: bytes) -> str:
    """Return the message of an error; Ray Serve's own refusals are not JSON."""
    try:
        return _read_error(body).error.message
    except msgspec.MsgspecError:
        return "Ray Serve"


class GrpcClient:
    """grpc.aio over one channel. `key` is an API key, if the stack requires one."""

    def __init__(self, address: str, key: str = "") -> None:
        self._metadata = (("authorization", f"Bearer {key}"),) if key else ()
        self._channel = grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self.stub: Any = RecommenderStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close(None)

    async def recommend(self, ask: RequestFields) -> RequestOutcome:
        """Call Recommend."""
        try:
            answer = await self.stub.Recommend(recommend_pb2.RecommendRequest(**ask), metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            return RequestOutcome(is_ok=False, tier="none", reason=f"{error.code().name.lower()}: {error.details()}")
        about = tuple([item.item_id for item in answer.items]), answer.bundle_version, answer.request_id
        return RequestOutcome(True, answer.tier, answer.reason, 1, *about)

    async def nothing(self) -> RequestOutcome:
        """Call the gRPC health check."""
        try:
            await self._health.Check(health_pb2.HealthCheckRequest())
        except grpc.aio.AioRpcError as error:
            return RequestOutcome(is_ok=False, tier="none", reason=error.code().name.lower())
        return RequestOutcome(is_ok=True, tier="none", reason="ok")


class LeanGrpcClient:
    """gRPC over a few HTTP/2 connections, for rates that would cost grpc.aio a core."""

    def __init__(self, address: str, key: str = "") -> None:
        metadata = (("authorization", f"Bearer {key}"),) if key else ()
        self._channel = Http2Channel(address, _NUM_CONNECTIONS, metadata)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._channel.close()

    def recommend(self, ask: RequestFields) -> "asyncio.Future[RequestOutcome]":
        """Call Recommend."""
        request = recommend_pb2.RecommendRequest(**ask).SerializeToString()
        return self._channel.call("/tailrace.v1.Recommender/Recommend", request, _grpc_outcome)


def _grpc_outcome(answer: CallAnswer) -> RequestOutcome:
    if answer.status:
        reason = f"{_STATUS_NAMES[answer.status]}: {answer.details}"
        return RequestOutcome(is_ok=False, tier="none", reason=reason)
    message = recommend_pb2.RecommendResponse.FromString(answer.message)
    about = tuple([item.item_id for item in message.items]), message.bundle_version, message.request_id
    return RequestOutcome(True, message.tier, message.reason, 1, *about)


LoadClient = RestClient | LeanGrpcClient
"""A client of one door for any rate."""
DoorClient = RestClient | GrpcClient
"""A minimal client of one door."""
Caller = DoorClient | ProductCaller
"""Requests recommendations: an error response is an outcome, not an exception."""
