"""Streams, disconnects, deadlines and keep-alive comments; on a real port where the connection matters."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from services.errors import DependencyUnavailable, NotFound, Overloaded, SchemaViolated
from tests.support.engine.parrot import MODEL, Parrot
from tests.support.wait import until
from tests.unit.gateway.openai.conftest import LIMITS
from tests.unit.gateway.world import World

COMPLETIONS = "/v1/completions"
KEEP_ALIVE = ": keep-alive"
SILENCE_S, STEP_S = 0.05, 0.3


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "a b c", "max_tokens": 32, **fields}


def chunks(text: str) -> list[dict[str, Any]]:
    return [json.loads(part[6:]) for part in text.split("\n\n") if part.startswith("data: {")]


@pytest.fixture
def slow(texts: World, parrot: Parrot) -> Parrot:
    """A writer whose time per token is several times the allowed silence of a stream."""
    assert texts.plane.text is not None
    texts.plane.text.limits = replace(LIMITS, silence_s=SILENCE_S)
    parrot.delay_s = STEP_S
    return parrot


def is_cancelled(texts: World, parrot: Parrot) -> bool:
    """Return whether the only completion was cancelled and cleaned up."""
    num_cancelled = texts.metric("tailrace_text_requests_total", route="completions", code="cancelled")
    return (num_cancelled, parrot.num_open, texts.metric("tailrace_text_in_flight")) == (1, 0, 0)


async def test_a_disconnect_cancels_a_stream_within_a_step(live_url: str, parrot: Parrot, texts: World) -> None:
    """The writer's iterator is closed while it waits for the next token."""
    parrot.hangs_after = 3
    async with (
        httpx.AsyncClient(base_url=live_url) as http,
        http.stream("POST", COMPLETIONS, json=body(stream=True)) as stream,
    ):
        await anext(stream.aiter_lines())
        await until(lambda: parrot.num_steps == 5)

    await until(lambda: is_cancelled(texts, parrot))
    assert parrot.num_steps == 5


@pytest.mark.parametrize("stream", [True, False])
async def test_a_disconnect_before_the_first_token_cancels_every_prompt(
    live_url: str, parrot: Parrot, texts: World, stream: bool
) -> None:
    """A disconnect cancels all prompts, for streams and for whole answers."""
    parrot.hangs_after = 0
    async with httpx.AsyncClient(base_url=live_url) as http:
        calling = asyncio.create_task(http.post(COMPLETIONS, json=body(stream=stream, prompt=["a", "b", "c"])))
        await until(lambda: parrot.num_open == 3)
        calling.cancel()

        await until(lambda: is_cancelled(texts, parrot))


async def test_a_deadline_before_the_first_token_is_a_504(http: httpx.AsyncClient, parrot: Parrot) -> None:
    """A deadline before any text is an error."""
    parrot.hangs_after = 0

    answer = await http.post(COMPLETIONS, json=body(), headers={"x-deadline-ms": "20"})

    assert (answer.status_code, answer.json()["error"]["type"]) == (504, "timeout_error")
    assert parrot.num_open == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_deadline_after_the_first_token_ends_the_choices(
    http: httpx.AsyncClient, parrot: Parrot, stream: bool
) -> None:
    """Every unfinished choice gets finish reason `length` and stop reason `deadline`."""
    parrot.hangs_after = 3

    answer = await http.post(COMPLETIONS, json=body(n=2, stream=stream), headers={"x-deadline-ms": "1000"})

    parts = chunks(answer.text) if stream else [answer.json()]
    choices = [choice for part in parts for choice in part["choices"]]
    ends = [(end["index"], end["finish_reason"], end["stop_reason"]) for end in choices if end["finish_reason"]]
    assert answer.status_code == 200
    assert ends == [(0, "length", "deadline"), (1, "length", "deadline")]
    assert "".join(choice["text"] for choice in choices if choice["index"] == 0) == " a b"
    assert answer.text.endswith("data: [DONE]\n\n") == stream


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (NotFound("there is no model", "see /v1/models"), 404, "invalid_request_error"),
        (Overloaded("text", 2), 429, "rate_limit_error"),
        (DependencyUnavailable("text", 2), 503, "server_error"),
        (SchemaViolated("/lr: 0 is too small"), 500, "server_error"),
        (RuntimeError("inside"), 500, "server_error"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_an_error_before_the_first_event_has_its_status(
    http: httpx.AsyncClient, parrot: Parrot, stream: bool, error: Exception, status: int, kind: str
) -> None:
    """Streams and whole answers have the error's status; an internal error reveals nothing."""
    parrot.error = error

    answer = await http.post(COMPLETIONS, json=body(stream=stream))

    assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
    assert answer.headers.get("retry-after") == ("2" if status in {429, 503} else None)
    assert "inside" not in answer.text


async def test_an_error_within_a_stream_is_its_last_event(
    http: httpx.AsyncClient, parrot: Parrot, texts: World
) -> None:
    """After the status is sent, an error is an event, without [DONE]."""
    parrot.error, parrot.num_before_error = RuntimeError("inside"), 2

    answer = await http.post(COMPLETIONS, json=body(stream=True))

    *pieces, last = chunks(answer.text)
    assert answer.status_code == 200
    assert [piece["choices"][0]["text"] for piece in pieces] == [" a", " b"]
    assert (last["error"]["type"], last["error"]["code"]) == ("server_error", "internal_error")
    assert "inside" not in answer.text
    assert "[DONE]" not in answer.text
    assert texts.metric("tailrace_text_requests_total", route="completions", code="internal") == 1


async def test_an_error_of_one_prompt_is_the_answer(http: httpx.AsyncClient, parrot: Parrot) -> None:
    """An answer has all prompts or is an error."""
    parrot.error, parrot.num_before_error = DependencyUnavailable("text", 1), 1

    answer = await http.post(COMPLETIONS, json=body(prompt=["a", "b"]))

    assert answer.status_code == 503
    assert parrot.num_open == 0


async def test_continuous_usage_is_in_every_chunk(http: httpx.AsyncClient) -> None:
    """vLLM's continuous_usage_stats adds usage to every chunk; load generators count tokens with it."""
    options = {"include_usage": True, "continuous_usage_stats": True}

    answer = await http.post(COMPLETIONS, json=body(max_tokens=2, stream=True, stream_options=options))

    assert [chunk["usage"]["completion_tokens"] for chunk in chunks(answer.text)] == [1, 2, 2]


async def test_silence_is_filled_with_comments(live_url: str, slow: Parrot) -> None:
    """Comments precede the first token and fill gaps between events, but never follow the end of a stream."""
    async with httpx.AsyncClient(base_url=live_url) as http:
        answer, whole = [await http.post(COMPLETIONS, json=body(stream=is_it, max_tokens=2)) for is_it in (True, False)]

    parts = answer.text.split("\n\n")
    events = [index for index, part in enumerate(parts) if part.startswith("data: ")]
    assert answer.status_code == 200
    assert parts[0] == parts[events[0] + 1] == KEEP_ALIVE
    assert {part for index, part in enumerate(parts) if index not in events} == {KEEP_ALIVE, ""}
    assert parts[-2:] == ["data: [DONE]", ""]
    assert whole.json()["choices"][0]["text"] == " a b"


async def test_an_error_after_a_comment_is_an_event(live_url: str, slow: Parrot) -> None:
    """The status is sent with the first comment; the openai client ignores comments and raises the error."""
    slow.error = Overloaded("text", 2)
    async with AsyncOpenAI(base_url=f"{live_url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.completions.create(model=MODEL, prompt="a b", stream=True)
        with pytest.raises(openai.APIError, match="text is overloaded"):
            await anext(stream)
