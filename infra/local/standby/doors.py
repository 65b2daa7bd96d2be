"""The standby's own servers of REST and gRPC, each behind a Unix socket, and how they send callers back when it is over."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import uvicorn
from grpc_health.v1 import health_pb2
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.grpc.door import RpcDoor, add_recommender_to_server
from services.gateway.grpc.rpc_accept import accept_widely

_RPC_AGE_MS = 2_000
"""A connection this old is asked to close (GOAWAY): so soon are callers back at HAProxy."""
_RPC_OPTIONS = (
    ("grpc.max_connection_age_ms", _RPC_AGE_MS),
    ("grpc.max_receive_message_length", 2**31 - 1),  # as Ray Serve's: what is too large, the door says itself
)


class HandsBack:
    """ASGI: off duty, every answer asks its connection to close, so that the caller's next one reaches HAProxy."""

    def __init__(self, app: ASGIApp, is_on_duty: Callable[[], bool]) -> None:
        self._app = app
        self._is_on_duty = is_on_duty

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, with one header more where it is due."""

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start" and not self._is_on_duty():
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        await self._app(scope, receive, answer)


def unix_socket(path: Path) -> socket.socket:
    """Listen at the path, whoever was there before."""
    path.unlink(missing_ok=True)
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    made.listen()
    return made


def rest_server(app: ASGIApp) -> uvicorn.Server:
    """Make the REST server; it ends by itself at SIGTERM."""
    return uvicorn.Server(
        uvicorn.Config(app, lifespan="off", log_level="warning", access_log=False, timeout_graceful_shutdown=1)
    )


def rpc_server(door: RpcDoor, path: Path) -> grpc.aio.Server:
    """Make the gRPC server; the caller starts it."""
    accept_widely()
    server = grpc.aio.server(options=_RPC_OPTIONS)
    add_recommender_to_server(door, server)
    server.add_generic_rpc_handlers((_health(door),))
    server.add_insecure_port(f"unix:{path}")
    return server


def _health(door: RpcDoor) -> Any:
    """`grpc.health.v1.Health/Check`, which the door answers."""
    answers, asks = health_pb2.HealthCheckResponse.SerializeToString, health_pb2.HealthCheckRequest.FromString
    check = grpc.unary_unary_rpc_method_handler(door.Check, asks, answers)
    return grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": check})
