"""The unmodified `openai` Python client over a real port: calls, its exceptions, and its logprobs."""

from collections.abc import AsyncIterator

import openai
import pytest
from openai import AsyncOpenAI

from services.contracts.text import TokenLogprob
from services.errors import ContextTooLong
from services.gateway.openai.chunks import completion_logprobs
from tests.support.engine.parrot import MODEL, Parrot

MESSAGES = [{"role": "user", "content": "one two three"}]


@pytest.fixture
async def client(live_url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{live_url}/v1", api_key="none", max_retries=0) as made:
        yield made


async def test_a_chat_with_logprobs(client: AsyncOpenAI) -> None:
    """The answer has role, text, finish reason, logprobs, and usage with cached tokens."""
    answer = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=2
    )

    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", " one two three one")
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [(token.token, token.logprob) for token in choice.logprobs.content][:2] == [(" one", -0.5), (" two", -0.5)]
    assert bytes(choice.logprobs.content[0].bytes or []) == b" one"
    assert [top.token for top in choice.logprobs.content[0].top_logprobs] == [" one", " ONE"]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 4, 7)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


async def test_a_streamed_chat(client: AsyncOpenAI) -> None:
    """The stream has first the role, then the text in pieces with the finish reason, last the usage."""
    stream = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_completion_tokens=3, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]

    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == " one two three"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None, None, None, "length"]
    assert (chunks[-1].choices, chunks[-1].usage and chunks[-1].usage.total_tokens) == ([], 6)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_a_completion_with_several_prompts_and_choices(client: AsyncOpenAI) -> None:
    """Choice c of prompt p has the index p * n + c; echo prepends the prompt to each choice."""
    answer = await client.completions.create(model=MODEL, prompt=["a b", "c"], n=2, max_tokens=2, echo=True)

    choices = [(choice.index, choice.text) for choice in answer.choices]
    assert choices == [(0, "a b a b"), (1, "a b a b"), (2, "c c c"), (3, "c c c")]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 8)


async def test_a_streamed_completion_with_logprobs(client: AsyncOpenAI) -> None:
    """Each chunk has the four lists; offsets count across the whole choice."""
    stream = await client.completions.create(
        model=MODEL, prompt=[7, 8], max_tokens=2, logprobs=2, stream=True, stop=["nowhere"]
    )
    chunks = [chunk.choices[0] async for chunk in stream]

    assert "".join(chunk.text for chunk in chunks) == " t7 t8"
    assert [chunk.logprobs and chunk.logprobs.text_offset for chunk in chunks] == [[0], [3]]
    assert chunks[0].logprobs is not None
    assert chunks[0].logprobs.top_logprobs == [{" t7": -0.5, " T7": -1.5}]


async def test_a_prompt_longer_than_the_context_has_openais_code(client: AsyncOpenAI, parrot: Parrot) -> None:
    """A too long prompt has OpenAI's error code; clients react to it by shortening the conversation."""
    parrot.error = ContextTooLong("messages", "9 tokens long", "send at most 8")

    with pytest.raises(openai.BadRequestError) as raised:
        await client.chat.completions.create(model=MODEL, messages=MESSAGES)

    assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "messages")
    assert raised.value.type == "invalid_request_error"


def token(token_bytes: bytes, logprob: float, *top: TokenLogprob) -> TokenLogprob:
    """Build a token; bytes that are not UTF-8 become a replacement character."""
    text = token_bytes.decode(errors="replace")
    return TokenLogprob(token=text, token_bytes=token_bytes, logprob=logprob, top=top, text_offset=0)


TOP = (token(b"a", -0.1), token(b"b", -3.0))
PARTS = (token(b"\xf0", -0.1), token(b"\xe6", -2.0), token(b"\xe7", -3.0))


@pytest.mark.parametrize(
    ("chosen", "shown"),
    [
        (token(b"c", -9.0, *TOP), {"a": -0.1, "b": -3.0, "c": -9.0}),
        (token(b"a", -0.1, *TOP), {"a": -0.1, "b": -3.0}),
        (token(b"\xe6", -2.0, *PARTS), {"\ufffd": -2.0}),
        (token(b"a", -4.0, *PARTS), {"\ufffd": -0.1, "a": -4.0}),
    ],
)
def test_the_chosen_token_is_among_the_top_ones(chosen: TokenLogprob, shown: dict[str, float]) -> None:
    """The chosen token is added if missing, as in OpenAI's API; among equal texts the chosen or best token counts."""
    assert completion_logprobs([chosen], len(chosen.top))["top_logprobs"] == [shown]
