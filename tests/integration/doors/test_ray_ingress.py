"""Ray's amended HAProxy behind the real edge: `pytest tests/integration/doors/test_ray_ingress.py`.

The installed Ray Serve writes the configuration; a test server replaces the gateway's replica.
"""

import asyncio
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from infra.local.edge.config import Upstream
from infra.local.servers.ray_ingress import IngressPlan, ingress_environment
from services.settings.settings import Settings, inherited_environment
from tests.support.gateway.edge_scene import STANDBY, EdgeScene
from tests.support.gateway.named_doors import HELD
from tests.support.servers import HOST, free_port
from tests.support.wait import until, wait_for


def write_configuration(
    folder: Path, settings: Settings, http_port: int, grpc_port: int, hosts: tuple[str, ...] = (HOST,)
) -> Path:
    """Write the configuration as Ray Serve does, for a replica on each host and Ray's fallback proxy."""
    from ray.serve._private.common import RequestProtocol
    from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
    from ray.serve.config import HTTPOptions, gRPCOptions

    path, servicer = folder / "haproxy.cfg", "grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server"
    config = HAProxyConfig(
        http_options=HTTPOptions(host=HOST, port=settings.inner_http_port),
        grpc_options=gRPCOptions(port=settings.inner_grpc_port, grpc_servicer_functions=[servicer]),
        socket_path=str(folder / "admin.sock"),
        server_state_base=str(folder),
        server_state_file=str(folder / "state"),
        metrics_enabled=False,
        metrics_port=free_port(),
        stats_port=free_port(),
        error_file_path=str(folder / "500.http"),
        has_received_routes=True,
        has_received_servers=True,
        retry_on="conn-failure empty-response",
        observe_error_limit=1,
    )
    ray = HAProxyApi(cfg=config, config_file_path=str(path))
    (folder / "500.http").write_text("HTTP/1.1 500 Internal Server Error\r\n\r\n")
    ray.set_backend_configs(
        {
            f"{protocol.value.lower()}-tailrace": BackendConfig(
                name=f"{protocol.value.lower()}-tailrace",
                path_prefix="/",
                app_name="tailrace",
                servers=[
                    ServerConfig(name=f"SERVE_REPLICA::tailrace-Gateway-abc{number}", host=host, port=port)
                    for number, host in enumerate(hosts)
                ],
                fallback_server=ServerConfig(name="SERVE_PROXY_ACTOR-abc", host=HOST, port=settings.metrics_port),
                protocol=protocol,
            )
            for protocol, port in ((RequestProtocol.HTTP, http_port), (RequestProtocol.GRPC, grpc_port))
        }
    )
    ray._generate_config_file_internal()
    return path


class Scene(EdgeScene):
    """The edge, the standby, Ray's HAProxy, and the ports of a replica behind it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.replica = free_port(), free_port()

    def start_around(self) -> None:
        """Start everything except the replica, and wait until the ingress passes the edge's checks."""
        settings = self.settings
        standby = Upstream(HOST, settings.standby_http_port, settings.standby_grpc_port)
        path = write_configuration(self.folder, settings, *self.replica)
        environment = ingress_environment(IngressPlan("0.0.0.0", standby))
        self.start("ingress", environment["RAY_SERVE_HAPROXY_BINARY_PATH"], "-db", "-f", str(path), **environment)
        self.start_edge()
        self.start_doors(STANDBY)
        self.until_open()
        wait_for(lambda: self.is_ray_up, 60.0, "the ingress behind the edge")

    def listening(self) -> set[tuple[str, int]]:
        """The addresses beyond loopback on which the ingress listens."""
        sockets = psutil.Process(self.children["ingress"].pid).net_connections()
        return {
            tuple(connection.laddr)
            for connection in sockets
            if connection.status == "LISTEN" and connection.laddr.ip != HOST
        }

    def open_connections(self, port: int) -> int:
        """Return the number of established connections to this port."""
        ingress = psutil.Process(self.children["ingress"].pid)
        return sum(
            connection.raddr[1:] == (port,)
            for connection in ingress.net_connections()
            if connection.status == "ESTABLISHED"
        )


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """A scene on free ports; nothing runs yet."""
    with closing(Scene(tmp_path)) as made:
        yield made


async def test_requests_in_flight_are_answered_by_the_standby_when_every_gateway_dies(scene: Scene) -> None:
    """The standby answers at once what a killed gateway held, and later requests; events are not resent."""
    scene.start_doors(HELD, scene.replica)
    scene.start_around()
    async with (
        httpx.AsyncClient(base_url=scene.url, timeout=20) as http,
        grpc.aio.insecure_channel(scene.settings.grpc_address) as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel)

        def check() -> "asyncio.Future[health_pb2.HealthCheckResponse]":
            return asyncio.ensure_future(health.Check(health_pb2.HealthCheckRequest(), timeout=20))

        held = asyncio.ensure_future(http.post("/v1/recommendations", json={"user_id": "u"})), check()
        event = asyncio.ensure_future(http.post("/v1/events", json={"user_id": "u"}))
        http_port, grpc_port = scene.replica
        await until(lambda: scene.open_connections(http_port) >= 2 and scene.open_connections(grpc_port))
        scene.kill(HELD)
        rest, rpc = await asyncio.gather(*held)
        (lost,) = await asyncio.gather(event, return_exceptions=True)
        later = [(await http.get("/")).text for _ in range(5)]
        await until(lambda: scene.is_ray_up is False)

        listening = scene.listening()
    assert rest.text == STANDBY
    assert rpc.status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert later == [STANDBY] * 5
    assert listening == {("0.0.0.0", port) for port in (scene.settings.inner_http_port, scene.settings.inner_grpc_port)}
    assert isinstance(lost, httpx.HTTPError) or (lost.status_code, lost.headers["retry-after"]) == (502, "1")


def test_no_proxy_interrupts_another_process(scene: Scene) -> None:
    """Woken for each refusal of a flood, the edge and Ray's HAProxy leave a gateway its turn."""
    scene.start_doors(HELD, scene.replica)
    scene.start_around()
    edge = psutil.Process(scene.children["edge"].pid).children()
    proxies = [*edge, psutil.Process(scene.children["ingress"].pid)]

    assert [(process.name(), os.sched_getscheduler(process.pid)) for process in proxies] == [
        ("haproxy", os.SCHED_BATCH)
    ] * 2


class Closing:
    """A replica that reads each request and closes the connection without an answer; its health checks pass."""

    def __init__(self, port: int) -> None:
        self.paths: list[str] = []
        self._listening = socket.create_server((HOST, port))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                with connection:
                    path = connection.recv(65_536).split(b" ")[1].decode()
                    if path.endswith("healthz"):
                        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                    else:
                        self.paths.append(path)

    def close(self) -> None:
        self._listening.close()


async def test_an_event_reaches_a_gateway_once(scene: Scene) -> None:
    """If a gateway reads an event and dies, neither edge nor ingress resends it; a ranking is resent.

    A path that only the gateway would read as the events path is not forwarded.
    """
    replica = Closing(scene.replica[0])
    try:
        scene.start_around()
        async with httpx.AsyncClient(base_url=scene.url, timeout=20) as http:
            with suppress(httpx.HTTPError):
                assert (await http.post("/v1/events", json={"user_id": "u"})).status_code == 502
            events = replica.paths.count("/v1/events")
            assert (await http.post("/v1/%65vents", json={"user_id": "u"})).status_code == 400
            await http.post("/v1/recommendations", json={"user_id": "u"})
    finally:
        replica.close()

    assert events == 1
    assert not [path for path in replica.paths if "%" in path]
    assert replica.paths.count("/v1/recommendations") > 1


@pytest.mark.parametrize(
    ("hosts", "own"),
    [
        ((HOST,), None),
        (("10.0.0.2", HOST, "10.0.0.3"), "abc1"),
        ((HOST, HOST, "10.0.0.2"), None),
        (("10.0.0.2", "10.0.0.3"), None),
    ],
)
def test_of_several_nodes_each_sends_to_its_own_gateway(
    tmp_path: Path, hosts: tuple[str, ...], own: str | None
) -> None:
    """With exactly one replica on this node, REST and gRPC prefer it to replicas on other nodes."""
    written = write_configuration(tmp_path, Settings(state_dir=tmp_path), free_port(), free_port(), hosts).read_text()

    rules = [line.split()[1] for line in IngressPlan().amend(written).splitlines() if "use-server" in line]

    assert rules == ([] if own is None else [f"SERVE_REPLICA::tailrace-Gateway-{own}"] * 2)


def test_another_configuration_is_refused(tmp_path: Path) -> None:
    """HAProxy does not start if a patch position is missing from its file, and the reason is printed."""
    path = tmp_path / "haproxy.cfg"
    path.write_text("global\n    nbthread 2\n")
    environment = ingress_environment(IngressPlan())

    ended = subprocess.run(
        [environment["RAY_SERVE_HAPROXY_BINARY_PATH"], "-db", "-f", path],
        env={**inherited_environment(), **environment},
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 1
    assert "Ray's HAProxy configuration has no" in ended.stderr
