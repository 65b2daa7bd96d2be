"""Callers of both doors: minimal clients for load, and the client that products install for a product's view.

Minimal clients write HTTP/1.1 directly on kept-alive connections, and use grpc.aio on one channel, or HTTP/2 directly.
The product's client takes eight times their processor time over REST, which at hundreds of requests a second the server
under test would lack.
"""

import asyncio
import json
from typing import Any, Self
from urllib.parse import quote

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.load.http2 import Http2Channel
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


class RestClient:
    """HTTP/1.1 with keep-alive; one connection per concurrent request. `key` is an API key, if required."""

    def __init__(self, host: str, port: int, key: str = "") -> None:
        self._address = (host, port)
        self._authorization = f"authorization: Bearer {key}\r\n".encode() if key else b""
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    @property
    def address(self) -> str:
        """HOST:PORT of the door."""
        return "{}:{}".format(*self._address)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exit: object) -> None:
        for _, writer in self._idle:
            writer.close()
            await writer.wait_closed()

    async def recommend(self, ask: RequestFields) -> RequestOutcome:
        """Call POST /v1/recommendations."""
        status, body = await self.call(b"POST", b"/v1/recommendations", json.dumps(ask).encode())
        if status == 429:
            return RequestOutcome(is_ok=False, tier="none", reason=f"http_429: {_who_refused(body)}")
        if status != 200:
            return RequestOutcome(is_ok=False, tier="none", reason=f"http_{status}")
        answer = json.loads(body)
        item_ids = tuple([item["item_id"] for item in answer["items"]])
        about = item_ids, answer["bundle_version"], answer["request_id"]
        return RequestOutcome(True, answer["tier"], answer["reason"], 1, *about)

    async def nothing(self) -> RequestOutcome:
        """Call GET /healthz."""
        status, _ = await self.call(b"GET", b"/healthz", b"")
        return RequestOutcome(is_ok=status == 200, tier="none", reason=f"http_{status}")

    async def call(self, method: bytes, path: bytes, body: bytes) -> tuple[int, bytes]:
        """Send one request and return (status, body); status 0 if no connection could carry it.

        A kept-alive connection that the server has closed is replaced, as in any HTTP client.
        """
        head = b"%s %s HTTP/1.1\r\nhost: %s\r\n%scontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        request = head % (method, path, self.address.encode(), self._authorization, len(body)) + body
        while True:
            is_kept = bool(self._idle)
            try:
                connection = self._idle.pop() if is_kept else await asyncio.open_connection(*self._address)
                answer = await _exchange(*connection, request)
            except (OSError, asyncio.IncompleteReadError):
                if not is_kept:
                    return 0, b""
            else:
                self._idle.append(connection)
                return answer


def _who_refused(body: bytes) -> str:
    """Return the message of an error; Ray Serve's own refusals are not JSON."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "Ray Serve"


async def _exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> tuple[int, bytes]:
    """Send and read. If interrupted, close the connection, since a response may still be in flight on it."""
    try:
        writer.write(request)
        return await _read_answer(reader)
    except BaseException:
        writer.close()
        raise


async def _read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    status = int(head[9:12])
    if b"transfer-encoding: chunked" not in head:
        length = int(head.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
        return status, await reader.readexactly(length)
    body = bytearray()
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)
    return status, bytes(body)


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

    async def recommend(self, ask: RequestFields) -> RequestOutcome:
        """Call Recommend."""
        request = recommend_pb2.RecommendRequest(**ask).SerializeToString()
        answer = await self._channel.call("/tailrace.v1.Recommender/Recommend", request)
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
