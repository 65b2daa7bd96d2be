"""Run the standby: `python -m infra.local.standby`, a gateway outside Ray for when Ray's ingress is unavailable.

It is the edge's backup server. It has no LLM: stored lists, the student and popularity answer, under the same keys,
limits and metrics as in any gateway.
"""

import asyncio
import gc
import signal
from types import FrameType
from typing import Any, NoReturn

import grpc
import structlog
import uvicorn
from grpc_health.v1 import health_pb2
from starlette.types import ASGIApp

from services.garbage import freeze_start
from services.gateway.grpc.acceptance import accept_many_calls
from services.gateway.grpc.door import RpcDoor, add_recommender_to_server
from services.observability.log_lines import configure_logging
from services.settings.settings import Settings, ending_with_error, load_settings

log = structlog.get_logger()


class RestServer(uvicorn.Server):
    """A server that looks once a second, instead of ten times, whether it should stop."""

    async def main_loop(self) -> None:
        while not await self.on_tick(0):  # noqa: ASYNC110 - a signal handler ends it
            await asyncio.sleep(1.0)


def rest_server(app: ASGIApp, host: str, port: int) -> RestServer:
    """Return the REST server, which ends at SIGTERM."""
    return RestServer(
        uvicorn.Config(
            app, host, port, lifespan="off", log_level="warning", access_log=False, timeout_graceful_shutdown=1
        )
    )


def rpc_server(door: RpcDoor, host: str, port: int, max_rpc_bytes: int) -> grpc.aio.Server:
    """Return the gRPC server, not started. It refuses larger messages unread, as Ray Serve's does."""
    accept_many_calls(lambda: None)
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", max_rpc_bytes)])
    add_recommender_to_server(door, server)
    server.add_generic_rpc_handlers((_health(door),))
    server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    return server


def _health(door: RpcDoor) -> Any:
    """Return the handlers of `grpc.health.v1.Health/Check`, which the door answers."""
    serialize, parse = health_pb2.HealthCheckResponse.SerializeToString, health_pb2.HealthCheckRequest.FromString
    check = grpc.unary_unary_rpc_method_handler(door.Check, parse, serialize)
    return grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": check})


async def run(settings: Settings) -> None:
    """Serve both doors until SIGTERM. The servers start last, when everything else is warm."""
    from services.app import open_standby

    async with open_standby(settings) as (rest_app, rpc_door):
        freeze_start()
        rpc = rpc_server(rpc_door, settings.inner_host, settings.standby_grpc_port, settings.max_rpc_bytes)
        await rpc.start()
        try:
            await rest_server(rest_app, settings.inner_host, settings.standby_http_port).serve()
        finally:
            log.info("stopping")
            await rpc.stop(None)
            gc.unfreeze()  # or libraries report leaked objects at the interpreter's end


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)


@ending_with_error()
def main() -> None:
    """Read settings and serve. Invalid settings, or files that they name, end it with their error."""
    signal.signal(signal.SIGTERM, _leave)
    settings = load_settings()
    configure_logging(settings.log_level, "standby", settings.log_file)
    asyncio.run(run(settings))


if __name__ == "__main__":
    main()
