"""Callers who leave, deadlines, and what goes wrong midway: on a real port where a connection is part of the rule."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from services.errors import DependencyAway, Overloaded
from tests.support.parrot import MODEL, Parrot
from tests.support.until import until
from tests.unit.gateway.world import World

COMPLETIONS = "/v1/completions"


def body(**fields: Any) -> dict[str, Any]:
    """A good body with these fields."""
    return {"model": MODEL, "prompt": "a b c", "max_tokens": 32, **fields}


def chunks(text: str) -> list[dict[str, Any]]:
    """The chunks of a stream, its end apart."""
    return [json.loads(part[6:]) for part in text.split("\n\n") if part.startswith("data: {")]


async def test_leaving_a_stream_cancels_within_a_step(live_url: str, parrot: Parrot, texts: World) -> None:
    """The writer's iterator is closed while it waits for the next token, not when there is one."""
    parrot.hangs_after = 3
    async with (
        httpx.AsyncClient(base_url=live_url) as http,
        http.stream("POST", COMPLETIONS, json=body(stream=True)) as s,
    ):
        await anext(s.aiter_lines())
        await until(lambda: parrot.num_steps == 5)

    await until(lambda: parrot.num_open == 0)
    assert parrot.num_steps == 5
    await until(lambda: texts.metric("tailrace_text_requests_total", route="completions", code="cancelled") == 1)
    assert texts.metric("tailrace_text_in_flight") == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_before_the_first_token_cancels_too(
    live_url: str, parrot: Parrot, texts: World, stream: bool
) -> None:
    """Streamed or not."""
    parrot.hangs_after = 0
    async with httpx.AsyncClient(base_url=live_url) as http:
        asking = asyncio.create_task(http.post(COMPLETIONS, json=body(stream=stream)))
        await until(lambda: parrot.num_open == 1)
        asking.cancel()

        await until(lambda: parrot.num_open == 0)
    await until(lambda: texts.metric("tailrace_text_requests_total", route="completions", code="cancelled") == 1)
    assert texts.metric("tailrace_text_in_flight") == 0


async def test_leaving_cancels_every_prompt(live_url: str, parrot: Parrot) -> None:
    """All writers of one request end with it."""
    parrot.hangs_after = 1
    async with httpx.AsyncClient(base_url=live_url) as http:
        asking = asyncio.create_task(http.post(COMPLETIONS, json=body(prompt=["a", "b", "c"])))
        await until(lambda: parrot.num_open == 3)
        asking.cancel()

        await until(lambda: parrot.num_open == 0)
    assert parrot.num_open == 0


async def test_a_deadline_before_the_first_token_is_a_504(http: httpx.AsyncClient, parrot: Parrot) -> None:
    """Nothing was written, so nothing can be given."""
    parrot.hangs_after = 0

    answer = await http.post(COMPLETIONS, json=body(), headers={"x-deadline-ms": "20"})

    assert (answer.status_code, answer.json()["error"]["type"]) == (504, "timeout_error")
    assert parrot.num_open == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_deadline_after_it_gives_what_is_written(http: httpx.AsyncClient, parrot: Parrot, stream: bool) -> None:
    """Finish reason length, stop reason deadline, for every choice that had not ended."""
    parrot.hangs_after = 3

    answer = await http.post(COMPLETIONS, json=body(n=2, stream=stream), headers={"x-deadline-ms": "200"})

    told = chunks(answer.text) if stream else [answer.json()]
    ends = [choice for one in told for choice in one["choices"] if choice["finish_reason"]]
    assert answer.status_code == 200
    assert [(end["index"], end["finish_reason"], end["stop_reason"]) for end in ends] == [
        (0, "length", "deadline"),
        (1, "length", "deadline"),
    ]
    assert "".join(c["text"] for one in told for c in one["choices"] if c["index"] == 0) == " a b"
    assert answer.text.endswith("data: [DONE]\n\n") == stream


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Overloaded("text", 2), 429, "rate_limit_error"),
        (DependencyAway("text", 2), 503, "server_error"),
        (RuntimeError("inside"), 500, "server_error"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_what_fails_before_the_first_event_has_its_status(
    http: httpx.AsyncClient, parrot: Parrot, stream: bool, error: Exception, status: int, kind: str
) -> None:
    """Streamed or not, and the inside stays inside."""
    parrot.error = error

    answer = await http.post(COMPLETIONS, json=body(stream=stream))

    assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
    assert ("retry-after" in answer.headers) == (status != 500)
    assert "inside" not in answer.text


async def test_what_fails_midway_is_the_last_event(http: httpx.AsyncClient, parrot: Parrot, texts: World) -> None:
    """The status is long gone: an error event, and no [DONE]."""
    parrot.error, parrot.num_before_error = RuntimeError("inside"), 2

    answer = await http.post(COMPLETIONS, json=body(stream=True))

    told = chunks(answer.text)
    assert answer.status_code == 200
    assert [one["choices"][0]["text"] for one in told[:-1]] == [" a", " b"]
    assert told[-1] == {
        "error": {
            "message": "something broke on our side; it is logged",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }
    }
    assert "[DONE]" not in answer.text
    assert texts.metric("tailrace_text_requests_total", route="completions", code="internal") == 1


async def test_usage_so_far_in_every_chunk_on_request(http: httpx.AsyncClient) -> None:
    """vLLM's continuous_usage_stats, by which load generators count tokens."""
    options = {"include_usage": True, "continuous_usage_stats": True}

    answer = await http.post(COMPLETIONS, json=body(max_tokens=2, stream=True, stream_options=options))

    assert [one["usage"]["completion_tokens"] for one in chunks(answer.text)] == [1, 2, 2]


async def test_one_prompt_that_fails_fails_them_all(http: httpx.AsyncClient, parrot: Parrot) -> None:
    """An answer is whole or an error."""
    parrot.error, parrot.num_before_error = DependencyAway("text", 1), 1

    answer = await http.post(COMPLETIONS, json=body(prompt=["a", "b"]))

    assert answer.status_code == 503
    assert parrot.num_open == 0


async def test_a_ranking_streams_too(http: httpx.AsyncClient) -> None:
    """One chunk per item, in the order of the list."""
    answer = await http.post(
        COMPLETIONS, json={"model": "tailrace-recommender", "prompt": "i00 i01 i02", "n": 2, "stream": True}
    )

    assert [(c["index"], c["text"]) for one in chunks(answer.text) for c in one["choices"]] == [(0, "i04"), (1, "i05")]


async def test_metrics_tell_of_first_tokens_and_gaps(http: httpx.AsyncClient, texts: World) -> None:
    """One first token per stream, a gap for every further token of a choice; what comes whole tells of neither."""
    await http.post(COMPLETIONS, json=body(max_tokens=4, n=2, stream=True))
    await http.post(COMPLETIONS, json=body(max_tokens=1))

    route = {"route": "completions"}
    assert texts.metric("tailrace_text_first_token_seconds_count", **route) == 1
    assert texts.metric("tailrace_text_token_gap_seconds_count", **route) == 6
    assert texts.metric("tailrace_text_tokens_total", kind="completion") == 9
    assert texts.metric("tailrace_text_tokens_total", kind="prompt") == 6
    assert texts.metric("tailrace_text_tokens_total", kind="cached") == 2
    assert texts.metric("tailrace_text_requests_total", code="ok", **route) == 2


async def test_a_ranking_is_a_recommendation_like_any_other(http: httpx.AsyncClient, texts: World) -> None:
    """Counted, its impression sent, found by the caller's id; refused ones are told of too."""
    ranked = {"model": "tailrace-recommender", "prompt": "i00 i01 i02"}
    await http.post(COMPLETIONS, json=ranked, headers={"x-request-id": "mine"})
    await http.post(COMPLETIONS, json={**ranked, "n": 2_000, "prompt": "x" * 300})

    asked = {"door": "openai"}
    assert texts.metric("tailrace_requests_total", tier="llm", reason="llm_in_time", code="ok", **asked) == 1
    assert texts.metric("tailrace_requests_total", tier="none", reason="none", code="invalid_request", **asked) == 1
    await until(lambda: "mine" in texts.shelf.records)
    assert len(texts.impressions.records) == 1


async def test_models_of_a_writer_that_is_away_are_a_503(http: httpx.AsyncClient, parrot: Parrot) -> None:
    """Leaving them out would say that they do not exist."""
    parrot.error = DependencyAway("text", 1)

    answer = await http.get("/v1/models")

    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


async def test_without_text_only_the_recommender_is_there(texts: World, http: httpx.AsyncClient) -> None:
    """And whoever asks for text is told how to have it."""
    texts.plane.text = None

    listed = (await http.get("/v1/models")).json()["data"]
    answer = await http.post(COMPLETIONS, json=body())

    assert [model["id"] for model in listed] == ["tailrace-recommender"]
    assert answer.status_code == 404
    assert "--text" in answer.json()["error"]["message"]
