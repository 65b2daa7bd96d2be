"""Text behind `TAILRACE_TEXT_URL`: two gateways on real ports; the second generates the text.

The caller's door, text tier, remote writer and the server's door are real; only the text model is fake.
"""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.gateway.openai.remote.client import RemoteWriter
from services.gateway.rest.door import create_rest_app
from services.gateway.text.rationale import MAX_TOKENS
from tests.support.engine.parrot import MODEL, NUM_CACHED, Parrot
from tests.support.wait import until
from tests.unit.gateway.openai.conftest import LIMITS, serve
from tests.unit.gateway.world import BREAKER_FAILURES, MAX_BODY_BYTES, NOW_S, World, let_write, started_world

COMPLETIONS = "/v1/completions"
ASK = {"user_id": "long", "k": 3, "rationale": True, "deadline_ms": 5_000}


class Caller:
    """A gateway whose text comes from another server."""

    def __init__(self, world: World, http: httpx.AsyncClient) -> None:
        self.world = world
        self.http = http

    def count(self, code: str) -> float:
        return self.world.metric("tailrace_text_requests_total", route="completions", code=code)


@pytest.fixture
async def caller(live_url: str, tmp_path: Path) -> AsyncIterator[Caller]:
    """A second gateway, on a port of its own, in front of the first."""
    remote = RemoteWriter(f"{live_url}/v1", lambda: "")
    in_world_time = RemoteWriter(f"{live_url}/v1", lambda: "", wall_clock=lambda: NOW_S)
    root = tmp_path / "caller"
    root.mkdir()
    async with started_world(root, in_world_time) as world:
        let_write(world, remote, LIMITS)
        app = create_rest_app(lambda: world.plane, lambda: b"", MAX_BODY_BYTES, echoes_request_id=True)
        async for url in serve(app):
            async with httpx.AsyncClient(base_url=url) as http:
                yield Caller(world, http)
    await remote.close()
    await in_world_time.close()


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "a b c", "max_tokens": 6, **fields}


async def test_text_and_metrics_pass_through_both(caller: Caller, texts: World) -> None:
    """The answer is the server's, and each gateway counts the text and its tokens once."""
    answer = (await caller.http.post(COMPLETIONS, json=body())).json()

    assert answer["choices"][0]["text"] == " a b c a b c"
    assert answer["usage"]["completion_tokens"] == 6
    for world in (caller.world, texts):
        assert world.metric("tailrace_text_requests_total", route="completions", code="ok") == 1
        assert world.metric("tailrace_text_tokens_total", kind="completion") == 6
        assert world.metric("tailrace_text_tokens_total", kind="cached") == NUM_CACHED


async def test_the_deadline_holds_at_both_ends(caller: Caller, parrot: Parrot) -> None:
    """The text so far is the answer at the caller's deadline, and the server works no longer."""
    parrot.hangs_after = 2

    answer = await caller.http.post(COMPLETIONS, json=body(), headers={"x-deadline-ms": "400"})

    choice, usage = answer.json()["choices"][0], answer.json()["usage"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (" a b", "length", "deadline")
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 2)
    await until(lambda: parrot.num_open == 0)


async def test_a_disconnect_cancels_the_servers_work(caller: Caller, parrot: Parrot, texts: World) -> None:
    """A caller that leaves frees places at both gateways, and the model stops within a step."""
    parrot.hangs_after = 1
    async with caller.http.stream("POST", COMPLETIONS, json=body(stream=True)) as stream:
        await anext(stream.aiter_lines())
        await until(lambda: parrot.num_open == 1)

    await until(lambda: parrot.num_open == 0 and caller.count("cancelled") == 1)
    assert [world.metric("tailrace_text_in_flight") for world in (caller.world, texts)] == [0, 0]


async def test_recommendations_do_not_wait_for_a_failed_server(caller: Caller, parrot: Parrot, texts: World) -> None:
    """While the server fails, the items arrive without a sentence; after some failures it is no longer asked."""
    let_write(texts, parrot, replace(LIMITS, max_tokens=MAX_TOKENS))
    first = (await caller.http.post("/v1/recommendations", json=ASK)).json()
    parrot.error = RuntimeError("out of memory")
    answers = [(await caller.http.post("/v1/recommendations", json=ASK)).json() for _ in range(BREAKER_FAILURES + 2)]

    assert first["rationale_reason"] == "written"
    assert [(len(answer["items"]), answer["rationale_reason"]) for answer in answers] == [(3, "failed")] * len(answers)
    assert len(parrot.requests) <= 1 + BREAKER_FAILURES
    assert caller.world.metric("tailrace_text_breaker_open") == 1
