"""The standby answers while Ray cannot, on the whole stack: `pytest tests/e2e/test_takeover.py`."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
import httpx
import psutil
import pytest

from services.contracts import recommend_pb2 as pb
from services.contracts import recommend_pb2_grpc as api
from tests.support.stack import Stack, new_user_id
from tests.support.wait import wait_for

ACTIVE, TAKEOVERS = "tailrace_standby_active", "tailrace_standby_takeovers_total"
DEADLINE_MS = 1_000
PAUSE_MS = 100
"""How long a gRPC channel pauses after a connection that was reset; as docs/faults.md advises, not its second."""


@dataclass
class Caller:
    """One who asks without a pause, and what came back: tiers, or the error's name."""

    ask: Callable[[], str]
    heard: list[str] = field(default_factory=list)

    def run(self, ended: threading.Event) -> None:
        """Ask until the end."""
        while not ended.wait(0.02):
            try:
                self.heard.append(self.ask())
            except (httpx.HTTPError, grpc.RpcError) as error:
                self.heard.append(f"failed: {error!r}")

    @property
    def failed(self) -> list[str]:
        """The requests that got no answer, and why."""
        return [word for word in self.heard if word.startswith("failed")]


@pytest.fixture(autouse=True)
def _healthy(stack: Stack) -> Iterator[None]:
    """Each test starts from a healthy stack, with the standby idle, and leaves one behind."""
    wait_for(lambda: stack.is_healthy() and stack.metric(ACTIVE) == 0, 120.0, "a healthy stack before the test")
    yield
    wait_for(lambda: stack.is_healthy() and stack.metric(ACTIVE) == 0, 180.0, "a healthy stack after the test")


@contextmanager
def callers(stack: Stack, user_id: str) -> Iterator[list[Caller]]:
    """Ask for one user over both doors, until the end."""

    def over_rest() -> str:
        asked = stack.rest.post("/v1/recommendations", json={"user_id": user_id, "deadline_ms": DEADLINE_MS})
        return str(asked.raise_for_status().json()["tier"])

    def over_rpc() -> str:
        request = pb.RecommendRequest(user_id=user_id, deadline_ms=DEADLINE_MS)
        return str(stub.Recommend(request, timeout=5, wait_for_ready=True).tier)

    pause = [("grpc.initial_reconnect_backoff_ms", PAUSE_MS), ("grpc.max_reconnect_backoff_ms", PAUSE_MS)]
    channel = grpc.insecure_channel(stack.settings.grpc_address, options=pause)
    stub = api.RecommenderStub(channel)
    ended, asking = threading.Event(), [Caller(over_rest), Caller(over_rpc)]
    threads = [threading.Thread(target=caller.run, args=(ended,)) for caller in asking]
    for thread in threads:
        thread.start()
    try:
        yield asking
    finally:
        ended.set()
        for thread in threads:
            thread.join()
        channel.close()


def hear(asking: list[Caller], tier: str, timeout_s: float = 180.0) -> None:
    """Wait until both callers hear this tier."""
    wait_for(lambda: all(caller.heard[-3:] == [tier] * 3 for caller in asking), timeout_s, f"answers of the {tier}")


def user_of_the_decoder(stack: Stack) -> str:
    """Make a user whom the decoder answers while it is there."""
    user_id = new_user_id()
    for item_id in ("50", "181", "172", "174"):
        stack.sees_click(user_id, item_id)
    return user_id


def kill_below(stack: Stack, part: str, name: str) -> None:
    """Kill a part's processes of this name: after a reload there is an older HAProxy beside the one that listens."""
    tree = psutil.Process(stack.pid(part)).children(recursive=True)
    named = [process for process in tree if process.name() == name]
    assert named, f"there is no {name}"
    for process in named:
        process.kill()


@pytest.mark.parametrize("victim", ["haproxy", "raylet"])
def test_every_request_is_answered_while_ray_is_unavailable(stack: Stack, victim: str) -> None:
    """But for those under way inside the victim: by the student, then by the decoder again, with nobody refused."""
    user_id = user_of_the_decoder(stack)
    takeovers = stack.metric(TAKEOVERS)
    with callers(stack, user_id) as asking:
        hear(asking, "llm")
        before = [caller.failed for caller in asking]
        kill_below(stack, "serve", victim)
        hear(asking, "student")
        wait_for(lambda: stack.metric(ACTIVE) == 1, 30.0, "the edge's own notice")
        hear(asking, "llm")
        wait_for(lambda: stack.metric(ACTIVE) == 0, 60.0, "the standby idle")

    assert before == [[], []]
    assert [caller.failed for caller in asking if len(caller.failed) > 2] == []
    assert not [word for caller in asking for word in caller.heard if "refused" in word.lower()]
    assert stack.metric(TAKEOVERS) == takeovers + 1


def test_without_a_gateway_the_standby_answers(stack: Stack) -> None:
    """Ray Serve makes new ones meanwhile."""
    user_id = user_of_the_decoder(stack)
    with callers(stack, user_id) as asking:
        hear(asking, "llm")
        stack.kill_processes(stack.replica_pids(lambda name: name.startswith("Gateway")))
        hear(asking, "student")
        hear(asking, "llm")

    assert all({"llm", "student"} <= set(caller.heard) for caller in asking)


def test_the_standby_answers_like_a_gateway(stack: Stack) -> None:
    """Readiness, events and refusals, and its metrics name it."""
    kill_below(stack, "serve", "raylet")
    wait_for(lambda: stack.metric(ACTIVE) == 1, 30.0, "the takeover")
    user_id = new_user_id()

    assert stack.rest.get("/readyz").status_code == 200
    assert stack.click(user_id, "50").status_code == 200
    refused = stack.rest.post("/v1/recommendations", json={"user_id": user_id, "k": "many"})
    assert refused.status_code == 422
    assert refused.json()["error"]["code"] == "invalid_request"
    assert stack.metric("tailrace_build_info", part="standby") == 1


def test_the_edge_killed(stack: Stack) -> None:
    """Its HAProxy: connections wait for the next one, and the part is not restarted. All of it: the supervisor starts it again."""
    restarts = stack.num_restarts("edge")
    with callers(stack, user_of_the_decoder(stack)) as asking:
        hear(asking, "llm")
        kill_below(stack, "edge", "haproxy")
        hear(asking, "llm")
        lost = [len(caller.failed) for caller in asking]
        refused = [word for caller in asking for word in caller.failed if "refused" in word.lower()]
        assert stack.num_restarts("edge") == restarts
        stack.kill("edge")
        hear(asking, "llm")

    assert max(lost) <= 2
    assert refused == []


def test_the_standby_killed(stack: Stack) -> None:
    """Callers do not notice, and the next one is there when it is needed."""
    with callers(stack, user_of_the_decoder(stack)) as asking:
        hear(asking, "llm")
        stack.kill("standby")
        wait_for(lambda: stack.is_healthy() and stack.metric(ACTIVE) == 0, 120.0, "a healthy standby, idle")
        hear(asking, "llm")
        kill_below(stack, "serve", "haproxy")
        hear(asking, "student")
        hear(asking, "llm")

    assert [caller.failed for caller in asking if len(caller.failed) > 2] == []
