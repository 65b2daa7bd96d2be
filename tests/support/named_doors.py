"""Two doors that answer with their name, until killed: `python -m tests.support.named_doors NAME HTTP_PORT GRPC_PORT`.

REST answers every path with the name. gRPC's health check says SERVING for the name `ray`, NOT_SERVING for any other.
"""

import asyncio
import sys
from typing import Any

from grpc_health.v1 import health_pb2
from starlette.responses import PlainTextResponse

from infra.local.standby.__main__ import rest_server, rpc_server

HOST = "127.0.0.1"
RAY = "ray"
MAX_RPC_BYTES = 2**20


class NamedDoor:
    """A gRPC door whose answer identifies its server."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def Check(self, _request: Any, _context: Any) -> Any:
        """Answer by the name."""
        states = health_pb2.HealthCheckResponse
        return states(status=states.SERVING if self._name == RAY else states.NOT_SERVING)

    Recommend = RecordEvents = Check


async def serve(name: str, http_port: int, grpc_port: int) -> None:
    """Serve both doors."""
    door: Any = NamedDoor(name)
    rpc = rpc_server(door, HOST, grpc_port, MAX_RPC_BYTES)
    await rpc.start()
    await rest_server(PlainTextResponse(name), HOST, http_port).serve()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
