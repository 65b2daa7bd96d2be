"""The standby beside a real HAProxy that is killed and comes back: `pytest tests/integration/test_standby.py`."""

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp

from infra.local.edge.config import ADMIN_SOCKET
from infra.local.servers.binaries import haproxy_command
from infra.local.standby.doors import HandsBack, rest_server, rpc_server, unix_socket
from infra.local.standby.handover import Main
from infra.local.standby.main_door import look
from infra.local.standby.relay import Relay
from infra.local.standby.shared_port import SharedPort, can_share
from infra.local.standby.watch import StandbyWatch
from services.observability.metrics import StandbyMetrics
from tests.support.servers import HOST, free_port
from tests.support.until import until

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not can_share(), reason="this kernel does not lead connections"),
]
MAIN, STANDBY = "main", "standby"
ACTIVE = "tailrace_standby_active"
CONFIG = """\
global
    stats socket unix@{folder}/{admin} mode 600 level admin
defaults
    mode http
    timeout connect 1s
    timeout client 30s
    timeout server 30s
frontend rest
    bind {host}:{rest}
    default_backend rest
frontend rpc
    bind {host}:{rpc} proto h2
    default_backend rpc
backend rest
    server replica unix@{folder}/main-rest.sock check inter 100ms
backend rpc
    server replica unix@{folder}/main-rpc.sock proto h2 check inter 100ms
"""


class NamedDoor:
    """A gRPC door that says only who it is: the main ones serve, the standby's do not."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def Check(self, request: Any, context: Any) -> Any:
        """Tell."""
        states = health_pb2.HealthCheckResponse
        return states(status=states.SERVING if self._name == MAIN else states.NOT_SERVING)

    Recommend = RecordEvents = Check


@dataclass
class Scene:
    """Both doors with a HAProxy in front, and the standby beside it, once it is there."""

    folder: Path
    rest: int
    rpc: int
    registry: CollectorRegistry
    main: AsyncExitStack
    haproxy: "subprocess.Popen[bytes] | None" = None

    async def start(self) -> None:
        """Start HAProxy and wait until it is well."""
        command = haproxy_command(self.folder / "haproxy.cfg")
        self.haproxy = subprocess.Popen(command, stderr=subprocess.DEVNULL)  # noqa: ASYNC220 - it only forks
        await until(lambda: look(self.folder) is Main.WELL)

    def kill(self) -> None:
        """SIGKILL it, if it lives."""
        if self.haproxy is not None:
            self.haproxy.kill()
            self.haproxy.wait()

    async def stand_by(self, closing: AsyncExitStack) -> None:
        """Start the standby."""
        relays = (
            await closing.enter_async_context(Relay(SharedPort(HOST, self.rest), self.folder / f"{STANDBY}-rest.sock")),
            await closing.enter_async_context(Relay(SharedPort(HOST, self.rpc), self.folder / f"{STANDBY}-rpc.sock")),
        )
        watch = StandbyWatch(relays, self.folder, self.folder / "beat", StandbyMetrics(self.registry))
        app = HandsBack(PlainTextResponse(STANDBY), lambda: watch.is_on_duty)
        await closing.enter_async_context(doors(self.folder, STANDBY, app))
        watching = asyncio.create_task(watch.run())
        closing.callback(watching.cancel)

    def metric(self, name: str) -> float | None:
        """What the standby tells."""
        return self.registry.get_sample_value(name)


@asynccontextmanager
async def scene_in(folder: Path) -> AsyncIterator[Scene]:
    """The main doors; HAProxy and the standby are started by the test."""
    (folder / "node").mkdir()
    rest, rpc = free_port(), free_port()
    config = CONFIG.format(folder=folder, admin=f"node/{ADMIN_SOCKET}", host=HOST, rest=rest, rpc=rpc)
    (folder / "haproxy.cfg").write_text(config)
    async with AsyncExitStack() as main:
        await main.enter_async_context(doors(folder, MAIN, PlainTextResponse(MAIN)))
        made = Scene(folder, rest, rpc, CollectorRegistry(), main)
        try:
            yield made
        finally:
            made.kill()


@pytest.fixture
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    """The scene in a folder of short name, since Unix sockets are in it."""
    async with scene_in(tmp_path_factory.mktemp("s")) as made:
        yield made


@asynccontextmanager
async def doors(folder: Path, name: str, app: ASGIApp) -> AsyncIterator[None]:
    """Run both servers of one side behind their Unix sockets."""
    door: Any = NamedDoor(name)
    rest, rpc = rest_server(app), rpc_server(door, folder / f"{name}-rpc.sock")
    await rpc.start()
    with unix_socket(folder / f"{name}-rest.sock") as listening:
        serving = asyncio.create_task(rest.serve(sockets=[listening]))
        try:
            yield
        finally:
            rest.should_exit = True
            await serving
            await rpc.stop(None)


@dataclass
class Callers:
    """Who keep asking, and what they heard: over a new connection each time, over kept ones, and over gRPC."""

    heard: dict[str, list[str]]
    asking: list["asyncio.Task[None]"]

    async def hear(self, name: str) -> None:
        """Wait until every caller hears this one, and nobody else any more."""
        await until(lambda: all(words[-5:] == [name] * 5 for words in self.heard.values()))


@asynccontextmanager
async def callers(scene: Scene) -> AsyncIterator[Callers]:
    """Ask without a pause until the end."""
    async with AsyncExitStack() as closing:
        url = f"http://{HOST}:{scene.rest}/"
        kept = await closing.enter_async_context(httpx.AsyncClient(timeout=5))
        once = httpx.AsyncClient(timeout=5, limits=httpx.Limits(max_keepalive_connections=0))
        await closing.enter_async_context(once)
        options = [("grpc.use_local_subchannel_pool", 1)]
        channel = await closing.enter_async_context(grpc.aio.insecure_channel(f"{HOST}:{scene.rpc}", options=options))
        health = health_pb2_grpc.HealthStub(channel)

        async def over_rpc() -> str:
            """Ask over gRPC."""
            answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=5)
            return MAIN if answer.status == health_pb2.HealthCheckResponse.SERVING else STANDBY

        async def over(client: httpx.AsyncClient) -> str:
            """Ask over REST, on a connection of this client's."""
            return (await client.get(url)).text

        ways: dict[str, Callable[[], Awaitable[str]]] = {
            "once": lambda: over(once),
            "kept": lambda: over(kept),
            "rpc": over_rpc,
        }
        made = Callers({name: [] for name in ways}, [])
        made.asking = [asyncio.create_task(_keep_asking(ways[name], made.heard[name])) for name in ways]
        try:
            yield made
        finally:
            for one in made.asking:
                one.cancel()
            await asyncio.gather(*made.asking, return_exceptions=True)


async def _keep_asking(ask: Callable[[], Awaitable[str]], heard: list[str]) -> None:
    while True:
        try:
            heard.append(await ask())
        except (httpx.TransportError, grpc.aio.AioRpcError) as error:
            heard.append(f"failed: {error!r}")
        await asyncio.sleep(0.005)


def failures(asked: Callers) -> dict[str, int]:
    """How many requests of each caller got no answer."""
    return {name: sum(word.startswith("failed") for word in words) for name, words in asked.heard.items()}


@pytest.mark.parametrize("haproxy_is_first", [False, True])
async def test_killed_and_back_over_both_doors(scene: Scene, haproxy_is_first: bool) -> None:
    """Twice: only what was under way in HAProxy when it died fails, at most one request a caller; nobody is refused."""
    async with AsyncExitStack() as closing:
        if haproxy_is_first:
            await scene.start()
        await scene.stand_by(closing)
        asked = await closing.enter_async_context(callers(scene))
        if not haproxy_is_first:
            await asked.hear(STANDBY)
            await scene.start()
        await asked.hear(MAIN)
        for num_kills in (1, 2):
            await until(lambda: scene.metric(ACTIVE) == 0)
            scene.kill()
            await asked.hear(STANDBY)

            await until(lambda: scene.metric(ACTIVE) == 1)

            assert max(failures(asked).values()) <= num_kills
            assert scene.metric("tailrace_standby_takeovers_total") == num_kills
            await scene.start()
            await asked.hear(MAIN)

        assert not [word for words in asked.heard.values() for word in words if "ConnectError" in word]


async def test_a_haproxy_without_a_gateway_is_ended(scene: Scene) -> None:
    """It would keep its callers waiting; without it they come to the standby."""
    async with AsyncExitStack() as closing:
        await scene.start()
        await scene.stand_by(closing)
        asked = await closing.enter_async_context(callers(scene))
        await asked.hear(MAIN)

        await scene.main.aclose()
        await asked.hear(STANDBY)

        assert scene.haproxy is not None
        assert scene.haproxy.wait(timeout=10) == -signal.SIGKILL


async def test_a_standby_that_ends_leaves_haproxy_alone(scene: Scene) -> None:
    """And nobody notices."""
    async with AsyncExitStack() as closing:
        await scene.start()
        asked = await closing.enter_async_context(callers(scene))
        async with AsyncExitStack() as standing_by:
            await scene.stand_by(standing_by)
            await until(lambda: scene.metric(ACTIVE) == 0)
            await asked.hear(MAIN)  # a caller whom it still held from its time on duty would notice
            for words in asked.heard.values():
                words.clear()
        await asked.hear(MAIN)

        assert sum(failures(asked).values()) == 0
