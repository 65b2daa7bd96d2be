"""A stream is never silent for long: comments fill its silence, the one before the first token included. On a real port."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from services.errors import Overloaded
from tests.support.parrot import MODEL, Parrot
from tests.support.until import until
from tests.unit.gateway.openai.conftest import LIMITS
from tests.unit.gateway.world import World

COMPLETIONS = "/v1/completions"
COMMENT = ": keep-alive"
SILENCE_S, STEP_S = 0.05, 0.3


@pytest.fixture
def slow(texts: World, parrot: Parrot) -> Parrot:
    """A writer that takes several times as long for each token as a stream may be silent."""
    assert texts.plane.text is not None
    texts.plane.text.limits = replace(LIMITS, silence_s=SILENCE_S)
    parrot.delay_s = STEP_S
    return parrot


@pytest.fixture
async def client(live_url: str) -> AsyncIterator[AsyncOpenAI]:
    """The client as its users make it."""
    async with AsyncOpenAI(base_url=f"{live_url}/v1", api_key="none", max_retries=0) as made:
        yield made


def body(**fields: Any) -> dict[str, Any]:
    """A good body for a stream."""
    return {"model": MODEL, "prompt": "a b", "max_tokens": 2, "stream": True, **fields}


async def test_silence_is_filled_before_and_between_tokens(live_url: str, slow: Parrot) -> None:
    """The head does not wait for the first token, comments stand between events, and nothing comes after the end."""
    async with httpx.AsyncClient(base_url=live_url) as http:
        answer = await http.post(COMPLETIONS, json=body())

    parts = answer.text.split("\n\n")
    told = [place for place, part in enumerate(parts) if part.startswith("data: ")]
    assert answer.status_code == 200
    assert parts[0] == COMMENT
    assert parts[told[0] + 1] == COMMENT
    assert {part for place, part in enumerate(parts) if place not in told} == {COMMENT, ""}
    assert parts[-2:] == ["data: [DONE]", ""]


async def test_the_openai_client_ignores_comments(client: AsyncOpenAI, slow: Parrot) -> None:
    """It gives what it gives without them."""
    stream = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "a b"}], max_tokens=2, stream=True
    )

    said = [chunk.choices[0].delta.content async for chunk in stream]

    assert said == ["", " a", " b"]


async def test_a_stream_that_flows_has_no_comment(live_url: str, texts: World, parrot: Parrot) -> None:
    """They stand for silence alone."""
    async with httpx.AsyncClient(base_url=live_url) as http:
        answer = await http.post(COMPLETIONS, json=body(max_tokens=32))

    assert answer.text.endswith("data: [DONE]\n\n")
    assert COMMENT not in answer.text


async def test_what_fails_after_a_long_silence_is_an_event(client: AsyncOpenAI, slow: Parrot) -> None:
    """The status is out by then, so the error comes in the stream, and clients raise it."""
    slow.error = Overloaded("text", 2)

    stream = await client.completions.create(**body())
    with pytest.raises(openai.APIError, match="text is overloaded"):
        await anext(stream)


async def test_leaving_a_silent_stream_cancels_it(live_url: str, slow: Parrot, texts: World) -> None:
    """Also when nothing but comments came."""
    slow.hangs_after = 0
    async with (
        httpx.AsyncClient(base_url=live_url) as http,
        http.stream("POST", COMPLETIONS, json=body()) as stream,
    ):
        line = await anext(stream.aiter_lines())

    assert line == COMMENT
    await until(lambda: slow.num_open == 0)
    await until(lambda: texts.metric("tailrace_text_requests_total", route="completions", code="cancelled") == 1)


async def test_what_is_not_streamed_says_nothing_before_its_end(live_url: str, slow: Parrot) -> None:
    """An answer has one status and one body, so nothing may come before them."""
    async with httpx.AsyncClient(base_url=live_url) as http:
        answer = await http.post(COMPLETIONS, json=body(stream=False))

    assert answer.json()["choices"][0]["text"] == " a b"
