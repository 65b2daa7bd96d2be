"""The standby answers while Ray cannot, on the whole stack."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
import httpx
import psutil
import pytest

from benchmarks.load.recommender_stub import RecommenderStub
from services.contracts import recommend_pb2 as pb
from tests.support.stacks.stack import AGAIN_WHEN_REFUSED, STANDBY_ACTIVE, Stack, admitted, new_user_id
from tests.support.wait import wait_for

pytestmark = pytest.mark.usefixtures("healthy")
TAKEOVERS = "tailrace_standby_takeovers_total"
DEADLINE_MS = 1_000
PAUSE_MS = 100
"""How long a gRPC channel pauses after a reset connection, as docs/faults.md recommends; the default is a second."""


@dataclass
class Caller:
    """A continuous caller and its results: tiers, or error names."""

    send: Callable[[], str]
    results: list[str] = field(default_factory=list)

    def run(self, ended: threading.Event) -> None:
        while not ended.wait(0.02):
            try:
                self.results.append(self.send())
            except (httpx.HTTPError, grpc.RpcError) as error:
                self.results.append(f"failed: {error!r}")

    @property
    def failed(self) -> list[str]:
        return [error for error in self.results if error.startswith("failed")]


@contextmanager
def callers(stack: Stack, user_id: str) -> Iterator[list[Caller]]:
    """Request recommendations for one user over REST and gRPC, until the end."""

    def over_rest() -> str:
        body = {"user_id": user_id, "deadline_ms": DEADLINE_MS}
        answer = admitted(lambda: stack.rest.post("/v1/recommendations", json=body))
        return str(answer.raise_for_status().json()["tier"])

    def over_rpc() -> str:
        request = pb.RecommendRequest(user_id=user_id, deadline_ms=DEADLINE_MS)
        return str(stub.Recommend(request, timeout=5, wait_for_ready=True).tier)

    pause = [("grpc.initial_reconnect_backoff_ms", PAUSE_MS), ("grpc.max_reconnect_backoff_ms", PAUSE_MS)]
    channel = grpc.insecure_channel(stack.settings.grpc_address, options=[*pause, AGAIN_WHEN_REFUSED])
    stub = RecommenderStub(channel)
    ended, calling = threading.Event(), [Caller(over_rest), Caller(over_rpc)]
    threads = [threading.Thread(target=caller.run, args=(ended,)) for caller in calling]
    for thread in threads:
        thread.start()
    try:
        yield calling
    finally:
        ended.set()
        for thread in threads:
            thread.join()
        channel.close()


def until_tier(calling: list[Caller], tier: str, timeout_s: float = 180.0) -> None:
    wait_for(lambda: all(caller.results[-3:] == [tier] * 3 for caller in calling), timeout_s, f"answers of the {tier}")


def user_of_the_decoder(stack: Stack) -> str:
    """Create a user whom the decoder serves while it is available."""
    user_id = new_user_id()
    for item_id in ("50", "181", "172", "174"):
        stack.sees_click(user_id, item_id)
    return user_id


def kill_below(stack: Stack, part: str, name: str) -> None:
    """Kill a part's processes of this name: after a reload an older HAProxy runs next to the listening process."""
    tree = psutil.Process(stack.pid(part)).children(recursive=True)
    named = [process for process in tree if process.name() == name]
    assert named, f"there is no {name}"
    for process in named:
        process.kill()


def test_every_request_is_answered_while_ray_restarts(stack: Stack) -> None:
    """If Ray's node server dies, the standby answers, including events and refusals, until Ray is restarted once."""
    takeovers, restarts = stack.metric(TAKEOVERS), stack.num_restarts("serve")
    with callers(stack, user_of_the_decoder(stack)) as calling:
        until_tier(calling, "llm")
        before = [caller.failed for caller in calling]
        kill_below(stack, "serve", "raylet")
        until_tier(calling, "student")
        wait_for(lambda: stack.metric(STANDBY_ACTIVE) == 1, 60.0, "the edge's metric")
        assert_standby_answers_like_a_gateway(stack)
        until_tier(calling, "llm")
        wait_for(lambda: stack.metric(STANDBY_ACTIVE) == 0, 60.0, "the standby idle")

    assert before == [[], []]
    assert [caller.failed for caller in calling if len(caller.failed) > 2] == []
    assert not [result for caller in calling for result in caller.results if "refused" in result.lower()]
    assert stack.metric(TAKEOVERS) == takeovers + 1
    assert stack.num_restarts("serve") == restarts + 1
    assert "serve: died" in stack.output


def assert_standby_answers_like_a_gateway(stack: Stack) -> None:
    """Check that the standby serves readiness, events and refusals, and that its metrics carry its name.

    An event that reaches a gateway while it dies is refused, since a second attempt could count it twice.
    """
    user_id = new_user_id()
    assert stack.rest.get("/readyz").status_code == 200
    wait_for(lambda: stack.click(user_id, "50").status_code == 200, 10.0, "an accepted event")
    refused = stack.rest.post("/v1/recommendations", json={"user_id": user_id, "k": "many"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "invalid_request")
    assert stack.metric("tailrace_build_info", part="standby") == 1
