"""REST and gRPC servers that answer with their name, until killed.

`python -m tests.support.gateway.named_doors NAME HTTP_PORT GRPC_PORT`. REST answers every path with the name. gRPC's
health check says SERVING for the name `ray`, NOT_SERVING for any other. With the name `held` both hold every request
until the process ends. The checks of Ray's HAProxy always pass.
"""

import asyncio
import sys
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from infra.local.standby.__main__ import rest_server, rpc_server

HOST = "127.0.0.1"
RAY = "ray"
MAX_RPC_BYTES = 2**20
HELD = "held"
CHECKS = ("/-/healthz", "/healthz")
PASSED = b"\x0a\x07success"
"""The response that Ray's HAProxy expects of a replica's gRPC server: `HealthzResponse(message="success")`."""


class NamedDoor:
    """A gRPC server whose answer identifies it."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def Check(self, _request: Any, _context: Any) -> Any:
        """Answer by the name."""
        await hold(self._name)
        states = health_pb2.HealthCheckResponse
        return states(status=states.SERVING if self._name == RAY else states.NOT_SERVING)

    Recommend = RecommendBatch = SimilarItems = Popular = Search = Assign = RecordEvents = Check
    EraseUser = GetErasure = PutItems = PatchItem = GetItem = DeleteItems = Check


async def hold(name: str) -> None:
    """Wait for ever if that is this server's task."""
    if name == HELD:
        await asyncio.Event().wait()


async def serve(name: str, http_port: int, grpc_port: int) -> None:
    """Serve both doors."""

    async def rest(scope: Scope, receive: Receive, send: Send) -> None:
        """Answer checks at once, and all other requests after the hold."""
        if scope["path"] not in CHECKS:
            await hold(name)
        await PlainTextResponse(name)(scope, receive, send)

    async def passed(_request: bytes, _context: Any) -> bytes:
        """Answer Ray's health check."""
        return PASSED

    door: Any = NamedDoor(name)
    rpc = rpc_server(door, HOST, grpc_port, MAX_RPC_BYTES)
    check = {"Healthz": grpc.unary_unary_rpc_method_handler(passed)}
    rpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("ray.serve.RayServeAPIService", check),))
    await rpc.start()
    await rest_server(rest, HOST, http_port).serve()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
