"""The edge in front of two nodes, each a process with real REST and gRPC servers."""

import csv
import io
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import grpc
import httpx
import pytest

from benchmarks.load.recommender_stub import RecommenderStub
from infra.local.edge.admin import num_ray_up, send, use_ray_host
from infra.local.edge.config import edge_folder
from services.contracts import recommend_pb2 as pb
from services.errors import ConfigError
from tests.support.gateway.edge_scene import EdgeScene
from tests.support.gateway.plain_doors import doors_at
from tests.support.servers import free_port
from tests.support.wait import wait_for

NODES = ("127.0.0.1", "127.0.0.2")
DEADLINE_MS = 2_000


class Nodes(NamedTuple):
    """The edge's folder, its ports, and each node's process."""

    folder: Path
    rest: httpx.Client
    rpc: RecommenderStub
    pids: tuple[int, ...]

    def ask_rest(self) -> bool:
        """Ask over REST; return whether there were items."""
        asked = {"user_id": "nobody", "k": 2, "deadline_ms": DEADLINE_MS}
        return bool(self.rest.post("/v1/recommendations", json=asked).json()["items"])

    def ask_grpc(self) -> bool:
        """Ask over gRPC; return whether there were items."""
        return bool(self.rpc.Recommend(pb.RecommendRequest(user_id="nobody", k=2, deadline_ms=DEADLINE_MS)).items)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Two nodes, both in service."""
    ports, state = (free_port(), free_port()), tmp_path_factory.mktemp("edge")
    with (
        doors_at(NODES[0], ports) as first,
        doors_at(NODES[1], ports) as second,
        closing(
            EdgeScene(state, {"inner_http_port": ports[0], "inner_grpc_port": ports[1], "standby": False})
        ) as scene,
    ):
        scene.start_edge(*(word for host in NODES for word in ("--ray-host", host)))
        folder, rpc_address = edge_folder(state), scene.settings.grpc_address
        wait_for(lambda: num_ray_up(folder) == len(NODES), what="both nodes")
        with httpx.Client(base_url=scene.url, timeout=10) as http, grpc.insecure_channel(rpc_address) as channel:
            yield Nodes(folder, http, RecommenderStub(channel), (first, second))


@contextmanager
def silent(pid: int) -> Iterator[None]:
    """Freeze a node: it accepts connections and does not answer."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def num_sent(nodes: Nodes, host: str) -> int:
    """Return the number of REST and gRPC requests that HAProxy has sent to a node."""
    rows = csv.DictReader(io.StringIO(send(nodes.folder, "show stat").removeprefix("# ")))
    return sum(int(row["stot"]) for row in rows if row["addr"].startswith(f"{host}:"))


def took_ms(nodes: Nodes, ask: Callable[[Nodes], bool]) -> float:
    """Send a request, which must be answered with items; return its duration."""
    began = time.perf_counter()
    assert ask(nodes)
    return 1_000 * (time.perf_counter() - began)


@pytest.mark.parametrize("ask", [Nodes.ask_rest, Nodes.ask_grpc])
def test_a_silent_node_is_passed_over_within_the_deadline(nodes: Nodes, ask: Callable[[Nodes], bool]) -> None:
    """Before a health check fails, the second node answers the requests of a silent node in time."""
    longest_ms, met_ms = 0.0, DEADLINE_MS / 3
    for _ in range(5):  # on busy cores a health check may fail before the first request
        wait_for(lambda: num_ray_up(nodes.folder) == len(NODES), what="both nodes")
        assert ask(nodes)
        with silent(nodes.pids[0]):
            longest_ms = max(took_ms(nodes, ask) for _ in NODES)
        if longest_ms > met_ms:
            break

    assert met_ms < longest_ms < DEADLINE_MS


def test_a_node_is_taken_out_of_service_and_put_back(nodes: Nodes) -> None:
    """A node out of service gets no new requests; an unknown node is rejected."""
    wait_for(lambda: num_ray_up(nodes.folder) == len(NODES), what="both nodes")

    use_ray_host(nodes.folder, NODES[0], is_used=False)
    before = num_sent(nodes, NODES[0])
    answered = [ask(nodes) for ask in (Nodes.ask_rest, Nodes.ask_grpc) for _ in range(6)]
    sent = num_sent(nodes, NODES[0])
    use_ray_host(nodes.folder, NODES[0], is_used=True)

    assert (all(answered), sent) == (True, before)
    wait_for(lambda: num_ray_up(nodes.folder) == len(NODES), what="both nodes again")
    with pytest.raises(ConfigError, match=r"10\.0\.0\.9: unknown; give one of the edge"):
        use_ray_host(nodes.folder, "10.0.0.9", is_used=True)
