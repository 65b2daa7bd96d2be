"""The standby: a gateway outside Ray, warm, that answers whenever Ray's HAProxy cannot. `python -m infra.local.standby`.

    callers ──▶ port ─┬─ HAProxy ── gateways, LLM            in normal times
                      └─ relay ── data plane of this process  while HAProxy is away, or has no gateway

It shares both ports with HAProxy, so it takes over without anybody noticing first; it is what hands back that has to be
decided. It has no LLM: stored lists, the student and popularity answer, under the same keys, limits and metrics.
"""

import asyncio
import gc
import signal
import socket
from contextlib import AsyncExitStack
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import grpc
import structlog
import uvicorn
from grpc_health.v1 import health_pb2
from prometheus_client import REGISTRY
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infra.local.handover import Duty, Main, advance
from infra.local.main_door import look
from infra.local.ray_home import proxy_folder, ray_home
from infra.local.relay import Relay
from infra.local.shared_port import SharedPort
from services.gateway.rpc import RpcDoor, add_recommender_to_server
from services.settings import Settings, load_settings
from services.telemetry import StandbyMetrics, configure_logging

log = structlog.get_logger()

LOOK_EVERY_S = 0.2
CHECK_EVERY = 5
"""At each so many looks it is checked that connections go where they should."""
_RPC_AGE_MS = 2_000
"""Calls wander back to HAProxy within this time: connections are asked to close (GOAWAY) when they are so old."""


class Standby:
    """Whether this process is on duty, and the watch that decides it."""

    def __init__(self, relays: tuple[Relay, ...], folder: Path, heartbeat: Path, metrics: StandbyMetrics) -> None:
        self._relays = relays
        self._folder = folder
        self._heartbeat = heartbeat
        self._metrics = metrics
        self._duty = Duty()
        self._num_looks = 0

    @property
    def is_on_duty(self) -> bool:
        """Whether new connections come here."""
        return self._duty.is_on

    async def watch(self) -> None:
        """Look, decide, lead; until cancelled."""
        while True:
            self._heartbeat.touch()
            await self._turn()
            await asyncio.sleep(LOOK_EVERY_S)

    async def _turn(self) -> None:
        main = await asyncio.to_thread(look, self._folder)
        if main is Main.GONE:
            for relay in self._relays:
                relay.port.other_is_gone()
        elif self._num_looks % CHECK_EVERY == 0:
            await self._check()
        self._num_looks += 1
        was, self._duty = self._duty, advance(self._duty, main)
        self.lead()
        if was.is_on is not self._duty.is_on:
            self._tell(main)

    async def _check(self) -> None:
        for relay in self._relays:
            if await relay.is_reached() is not self.is_on_duty:
                log.warning("standby_misled", port=relay.port.socket.getsockname()[1], on_duty=self.is_on_duty)
                relay.port.was_mistaken()

    def lead(self) -> None:
        """Have connections go where they should."""
        for relay in self._relays:
            relay.port.lead(to_us=self.is_on_duty)
        self._metrics.active.set(self.is_on_duty)

    def _tell(self, main: Main) -> None:
        if self.is_on_duty:
            self._metrics.takeovers.inc()
            log.warning("standby_took_over", haproxy=main)
        else:
            log.info("standby_handed_back")


class HandsBack:
    """ASGI: off duty, every answer asks its connection to close, so that the caller's next one reaches HAProxy."""

    def __init__(self, app: ASGIApp, standby: Standby) -> None:
        self._app = app
        self._standby = standby

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, with one header more where it is due."""

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start" and not self._standby.is_on_duty:
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        await self._app(scope, receive, answer)


async def run(settings: Settings) -> None:
    """Serve until SIGTERM."""
    from services.app import open_standby

    home, host = ray_home(settings.state_dir), settings.door_host
    rest_path, rpc_path = home / "rest.sock", home / "rpc.sock"
    async with AsyncExitStack() as closing:
        rest_app, rpc_door = await closing.enter_async_context(open_standby(settings))
        gc.collect()
        gc.freeze()
        rest_socket = closing.enter_context(_unix_socket(rest_path))
        rpc_server = _rpc_server(rpc_door, rpc_path)
        await rpc_server.start()
        closing.push_async_callback(rpc_server.stop, None)
        relays = (
            Relay(SharedPort(host, settings.door_http_port), rest_path),
            Relay(SharedPort(host, settings.door_grpc_port), rpc_path),
        )
        standby = Standby(relays, proxy_folder(home), settings.standby_heartbeat, StandbyMetrics(REGISTRY))
        for relay in relays:
            await closing.enter_async_context(relay)
        rest = _rest_server(HandsBack(rest_app, standby))
        watching = asyncio.create_task(standby.watch())
        watching.add_done_callback(lambda _: setattr(rest, "should_exit", True))
        closing.callback(watching.cancel)
        await rest.serve(sockets=[rest_socket])
        if watching.done():
            watching.result()


def _unix_socket(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    made.listen()
    return made


def _rest_server(app: ASGIApp) -> uvicorn.Server:
    """It ends by itself at SIGTERM, and everything else with it."""
    return uvicorn.Server(
        uvicorn.Config(app, lifespan="off", log_level="warning", access_log=False, timeout_graceful_shutdown=1)
    )


def _rpc_server(door: RpcDoor, path: Path) -> grpc.aio.Server:
    server = grpc.aio.server(options=[("grpc.max_connection_age_ms", _RPC_AGE_MS)])
    add_recommender_to_server(door, server)
    server.add_generic_rpc_handlers((_health(door),))
    server.add_insecure_port(f"unix:{path}")
    return server


def _health(door: RpcDoor) -> Any:
    """`grpc.health.v1.Health/Check`, which the door answers."""
    answers, asks = health_pb2.HealthCheckResponse.SerializeToString, health_pb2.HealthCheckRequest.FromString
    check = grpc.unary_unary_rpc_method_handler(door.Check, asks, answers)
    return grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": check})


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)


def main() -> None:
    """Read settings and stand by."""
    signal.signal(signal.SIGTERM, _leave)
    settings = load_settings()
    configure_logging(settings.log_level)
    asyncio.run(run(settings))


if __name__ == "__main__":
    main()
