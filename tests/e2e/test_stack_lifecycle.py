"""The shared stack is interrupted, restarted with keys, TLS and a store password, and crashed, after all others."""

import os
import shutil
import signal
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
import trustme

from benchmarks.load.recommender_stub import RecommenderStub
from infra.local.commands.guide import rest_address
from infra.local.servers.ray_home import ray_home
from infra.local.supervisor.keeper import children_of
from infra.local.supervisor.leftovers import find_leftovers
from infra.local.supervisor.ports import INNER_PORTS, PUBLIC_PORTS, ports_of
from infra.local.supervisor.stackfile import StackFile
from services.contracts import recommend_pb2 as pb
from services.settings.settings import Settings
from tests.support.gateway.keys import bearer
from tests.support.gateway.tls_proxy import issue
from tests.support.servers import holding
from tests.support.stacks.stack import Stack, survivors
from tests.support.wait import wait_for

AMPLE_MS = 4_000
USER = "comes-back"


@dataclass(frozen=True)
class Interruption:
    """The state of the shared stack after Ctrl-C, with an applied click of USER."""

    exit_code: int
    survivors: list[str]
    leftovers: list[psutil.Process]
    newest_event_time_ms: int
    last_request_id: str


@pytest.fixture(scope="module")
def interrupted(stack: Stack) -> Interruption:
    """The shared stack, ended by SIGINT."""
    seen, processes = stack.sees_click(USER, "50"), stack.processes()
    last = stack.recommend(USER)
    os.kill(stack.supervisor_pid, signal.SIGINT)
    code = stack.reap()
    return Interruption(
        code,
        survivors(processes),
        [*find_leftovers(stack.settings.state_dir)],
        seen["newest_event_time_ms"],
        last["request_id"],
    )


@dataclass
class Secured:
    """The shared stack with keys and TLS: its REST client has the shop's key and trusts the test authority."""

    stack: Stack
    keys: dict[str, str]
    ca: trustme.CA

    def channel(self) -> grpc.Channel:
        """Return a gRPC channel."""
        credentials = grpc.ssl_channel_credentials(self.ca.cert_pem.bytes())
        return grpc.secure_channel(self.stack.settings.grpc_address, credentials)


@pytest.fixture(scope="module")
def made(interrupted: Interruption, stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Secured:
    """The interrupted stack with other settings, not started; it keeps its state folder and public ports."""
    folder, ca = tmp_path_factory.mktemp("secured"), trustme.CA()
    (folder / "password").write_text("a,pass=word\n")
    issue(ca, folder / "tls")
    changes = {
        "tls_dir": folder / "tls",
        "api_keys_file": folder / "keys.json",
        "redis_password_file": folder / "password",
        "gateway_replicas": 1,
        "llm_routing": "always",
    }
    own = {name: getattr(stack.settings, name) for name in ("state_dir", *PUBLIC_PORTS)}
    stack.settings = Settings(**own, **changes)
    keys = {"shop": stack.new_key("shop", "recommend", "events"), "ops": stack.new_key("ops", "admin")}
    context = ssl.create_default_context()
    ca.configure_trust(context)
    stack.rest.close()
    stack.rest = httpx.Client(
        base_url=rest_address(stack.settings), verify=context, timeout=20, headers=bearer(keys["shop"])
    )
    return Secured(stack, keys, ca)


@pytest.fixture
def secured(made: Secured) -> Secured:
    """The same stack, running next to other servers on the default ports and on its earlier ports."""
    if not made.stack.is_running:
        before = StackFile(made.stack.settings.state_dir).ports()
        with holding([*ports_of(Settings()).values(), *(before[name] for name in INNER_PORTS)]):
            made.stack.start()
    return made


def test_a_start_that_cannot_succeed_is_refused(stack: Stack, tmp_path: Path) -> None:
    """The stack does not start on a used port, or a second time in one folder."""
    shutil.copytree(stack.settings.bundle_root, tmp_path / "state" / "bundles")
    taken = Stack(tmp_path / "state")
    taken.settings = taken.settings.model_copy(update={"redis_port": stack.settings.redis_port})

    refused, again = taken.command("up"), stack.command("up")
    taken.rest.close()

    assert (refused.returncode, again.returncode) == (1, 1)
    assert "tailrace down" in again.stderr
    assert f"port {stack.settings.redis_port} is taken" in refused.stderr
    assert "TAILRACE_REDIS_PORT" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert find_leftovers(taken.settings.state_dir) == []


def test_ctrl_c_leaves_no_process(interrupted: Interruption, stack: Stack) -> None:
    """SIGINT stops everything in order; Ray's logs are kept, its folder is removed."""
    assert interrupted.exit_code == 0
    assert interrupted.survivors == []
    assert interrupted.leftovers == []
    assert not ray_home(stack.settings.state_dir).exists()
    assert list((stack.settings.state_dir / "logs" / "ray").glob("worker-*.err"))


def test_ctrl_c_costs_no_log_line(interrupted: Interruption, stack: Stack) -> None:
    """The log contains the last answer and the last line of each stopped process."""
    answered = stack.log_lines(request_id=interrupted.last_request_id, event="recommended")
    stopping = {line["part"] for line in stack.log_lines(event="stopping")}
    others = [(stack.settings.state_dir / "logs" / f"{part}.log").read_text() for part in ("worker", "edge")]

    assert len(answered) == 1
    assert {"serve", "standby"} <= stopping
    assert all('"event": "stopping"' in text for text in others)


def test_the_next_start_has_the_data_and_both_doors_see_a_click_over_tls(
    secured: Secured, interrupted: Interruption
) -> None:
    """Features survive the stop, the new password and the store's new port; a click passes every part."""
    kept, seen = secured.stack.known(USER), secured.stack.sees_click("new", "50")

    assert "127.0.0.1:6379" not in secured.stack.command("status").stdout
    assert kept["newest_event_time_ms"] == interrupted.newest_event_time_ms
    assert len(seen["items"]) == 10
    with secured.channel() as channel:
        request = pb.RecommendRequest(user_id="new", k=5, deadline_ms=AMPLE_MS)
        stub = RecommenderStub(channel)
        metadata = list(bearer(secured.keys["shop"]).items())
        wait_for(lambda: stub.Recommend(request, metadata=metadata).newest_event_time_ms, 60.0, "the click over gRPC")


def test_without_a_key_only_probes_and_the_document_are_open(secured: Secured) -> None:
    """REST and gRPC enforce keys; metrics need the scope admin."""
    http, nobody, operator = secured.stack.rest, {"authorization": ""}, bearer(secured.keys["ops"])
    paths = ("/healthz", "/readyz", "/v1/bundle", "/metrics", "/openapi.json")
    statuses = [http.get(path, headers=nobody).status_code for path in paths]
    with secured.channel() as channel, pytest.raises(grpc.RpcError) as refused:
        RecommenderStub(channel).Recommend(pb.RecommendRequest(user_id="1"))

    assert statuses == [200, 200, 401, 401, 200]
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert [http.get("/metrics", headers=headers).status_code for headers in ({}, operator)] == [403, 200]


def test_down_ends_what_a_killed_supervisor_and_keeper_left(secured: Secured) -> None:
    """`tailrace down` finds remaining processes by their mark."""
    own = secured.stack
    processes, keepers = own.processes(), children_of(own.supervisor_pid)

    for pid in [own.supervisor_pid, *keepers]:
        os.kill(pid, signal.SIGSTOP)
    for pid in [*keepers, own.supervisor_pid]:
        os.kill(pid, signal.SIGKILL)
    own.reap()
    swept = own.command("down")
    wait_for(lambda: not survivors(processes), 60.0, "the end of every process")

    assert swept.returncode == 0
    assert find_leftovers(own.settings.state_dir) == []
