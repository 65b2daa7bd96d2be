"""The edge in front of two named servers that are killed, frozen and restarted."""

import asyncio
import itertools
import signal
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.load.recommender_stub import RecommenderStub
from infra.local.edge.admin import send
from infra.local.edge.config import edge_folder
from services.contracts import recommend_pb2 as pb
from services.observability.node_metrics import node_registry
from tests.support.gateway.edge_scene import STANDBY, EdgeScene
from tests.support.gateway.named_doors import RAY
from tests.support.wait import until

BEGUN = "peer closed connection without sending complete message body"
LIMITS = ("proc.limit_rest", "proc.limit_grpc", "proc.fair_rest", "proc.fair_grpc")
ACTIVE, TAKEOVERS = "tailrace_standby_active", "tailrace_standby_takeovers_total"


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[EdgeScene]:
    """A scene on free ports; nothing runs yet."""
    with closing(EdgeScene(tmp_path)) as made:
        yield made


@pytest.fixture
async def running(scene: EdgeScene) -> EdgeScene:
    """Edge, ingress and standby, all answering."""
    for name in (RAY, STANDBY):
        scene.start_doors(name)
    scene.start_edge()
    scene.until_open()
    await until(lambda: scene.is_ray_up)
    return scene


def metric(scene: EdgeScene, name: str) -> float:
    """The edge's own metric; 0 before it is published."""
    families = node_registry(scene.settings.metrics_dir).collect()
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


@dataclass
class Callers:
    """The answers of continuous callers: over new connections, over a kept connection, and over gRPC."""

    answers: dict[str, list[str]]
    tasks: list["asyncio.Task[None]"] = field(default_factory=list)

    async def answered_by(self, name: str) -> None:
        await until(lambda: all(words[-5:] == [name] * 5 for words in self.answers.values()))

    def failures(self) -> dict[str, list[str]]:
        """Return each caller's failed requests, except partial answers, which no other server can complete."""
        return {
            way: [word for word in words if word.startswith("failed") and BEGUN not in word]
            for way, words in self.answers.items()
        }


@asynccontextmanager
async def callers(scene: EdgeScene) -> AsyncIterator[Callers]:
    """Send requests without a pause until the end."""
    url = f"{scene.url}/"
    async with AsyncExitStack() as closing:
        kept = await closing.enter_async_context(httpx.AsyncClient(timeout=4))
        once = httpx.AsyncClient(timeout=4, limits=httpx.Limits(max_keepalive_connections=0))
        await closing.enter_async_context(once)
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 100)]
        channel = grpc.aio.insecure_channel(scene.settings.grpc_address, options=options)
        health = health_pb2_grpc.HealthStub(await closing.enter_async_context(channel))

        async def over_rpc() -> str:
            answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=4, wait_for_ready=True)
            return RAY if answer.status == health_pb2.HealthCheckResponse.SERVING else STANDBY

        async def over_rest(client: httpx.AsyncClient) -> str:
            """Call over REST, on this client's connection."""
            return (await client.get(url)).raise_for_status().text

        ways: dict[str, Callable[[], Awaitable[str]]] = {
            "once": lambda: over_rest(once),
            "kept": lambda: over_rest(kept),
            "rpc": over_rpc,
        }
        made = Callers({name: [] for name in ways})
        made.tasks = [asyncio.create_task(_call_on(ways[name], made.answers[name])) for name in ways]
        try:
            yield made
        finally:
            for task in made.tasks:
                task.cancel()
            await asyncio.gather(*made.tasks, return_exceptions=True)


async def _call_on(call: Callable[[], Awaitable[str]], answers: list[str]) -> None:
    while True:
        try:
            answers.append(await call())
        except (httpx.HTTPError, grpc.aio.AioRpcError) as error:
            answers.append(f"failed: {error!r}")
        await asyncio.sleep(0.005)


async def test_a_health_check_without_a_limit_ends_the_limit(running: EdgeScene) -> None:
    """Servers that announce no limit, such as older gateways, are called without a limit."""
    folder = edge_folder(running.folder)
    for limit in LIMITS:
        assert not send(folder, f"experimental-mode on; set var {limit} int(7)")
    await until(lambda: [send(folder, f"get var {limit}").rpartition("<")[2] for limit in LIMITS] == ["0>"] * 4)


async def test_the_ingress_killed_and_back(running: EdgeScene) -> None:
    """Every REST and gRPC request is answered; the ingress answers again once it passes its checks."""
    async with callers(running) as calling:
        await calling.answered_by(RAY)
        await until(lambda: metric(running, ACTIVE) == 0)

        running.kill(RAY)
        await calling.answered_by(STANDBY)
        await until(lambda: metric(running, ACTIVE) == 1)
        running.start_doors(RAY)
        await calling.answered_by(RAY)
        await until(lambda: metric(running, ACTIVE) == 0)

    assert calling.failures() == {"once": [], "kept": [], "rpc": []}
    assert metric(running, TAKEOVERS) == 1


async def test_an_ingress_that_hangs(running: EdgeScene) -> None:
    """After two checks without an answer the standby answers; only requests in the ingress fail."""
    async with callers(running) as calling:
        await calling.answered_by(RAY)
        running.children[RAY].send_signal(signal.SIGSTOP)
        await calling.answered_by(STANDBY)

        running.children[RAY].send_signal(signal.SIGCONT)
        await calling.answered_by(RAY)

    assert max(len(words) for words in calling.failures().values()) <= 1


async def test_haproxy_killed(running: EdgeScene) -> None:
    """Only requests in flight fail: connections wait at the edge's sockets until the next HAProxy accepts them."""
    async with callers(running) as calling:
        await calling.answered_by(RAY)
        await asyncio.sleep(3.0)  # a second early exit after the start ends the edge
        running.kill_haproxy()
        await calling.answered_by(RAY)

    failures = calling.failures()
    assert max(len(words) for words in failures.values()) <= 1
    assert not [word for words in failures.values() for word in words if "ConnectError" in word]


async def test_a_request_id_that_is_not_utf8_is_refused_by_name(running: EdgeScene) -> None:
    """Header bytes that are not text get 400 with the header's name; any UTF-8 passes."""
    pieces = [b"a", "é€😀".encode(), b"\x80", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82"]
    sent = [b"".join(chosen) for n in (1, 2, 3) for chosen in itertools.product(pieces, repeat=n)]
    async with httpx.AsyncClient() as client:
        url = f"{running.url}/v1/recommendations"
        answers = [
            await client.post(url, headers=[(b"x-request-id", request_id)], json={})
            for request_id in [*sent, b"\xff" * 8_000]
        ]

    refused = {request_id for request_id, answer in zip(sent, answers, strict=False) if answer.status_code == 400}
    assert refused == {request_id for request_id in sent if "\ufffd" in request_id.decode(errors="replace")}
    assert answers[-1].json()["error"]["field"] == "x-request-id"


async def test_without_any_server_the_edge_answers(scene: EdgeScene) -> None:
    """REST gets our error envelope with Retry-After, gRPC the status UNAVAILABLE; the log names the outage once."""
    scene.start_edge()
    url = f"{scene.url}/v1/recommendations"
    async with httpx.AsyncClient() as client:
        await until(lambda: scene.is_ray_up is False)
        answer = await client.post(url, json={}, headers={"x-request-id": 'a, "b" %s'})
        unnamed = await client.post(url, json={})
    async with grpc.aio.insecure_channel(scene.settings.grpc_address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=4)

    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert (answer.json()["error"]["code"], answer.json()["error"]["request_id"]) == ("unavailable", 'a, "b" %s')
    assert len(unnamed.json()["error"]["request_id"]) == len(str(uuid.uuid4()))
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    log = scene.folder / "edge.log"
    await until(lambda: "Server rest/ray is DOWN" in log.read_text())
    assert log.read_text().count("Server rest/ray is DOWN") == 1


def test_a_recommendation_ends_although_the_gateway_that_took_it_has_no_processor_time(running: EdgeScene) -> None:
    """The edge answers both doors itself, with the error of a missed deadline."""
    frozen = running.children[RAY]
    channel = grpc.insecure_channel(running.settings.grpc_address)
    stub, request = RecommenderStub(channel), pb.RecommendRequest(deadline_ms=300)
    stub.Recommend(request)  # an ingress that does not even accept a connection is passed over
    frozen.send_signal(signal.SIGSTOP)
    try:
        calling = stub.Recommend.future(request, timeout=60)
        answer = httpx.post(f"{running.url}/v1/recommendations", json={"deadline_ms": 300}, timeout=60)
        error = calling.exception(60)
    finally:
        frozen.send_signal(signal.SIGCONT)
        channel.close()

    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert error.details() == "the gateway: the deadline passed"
