"""The `openai` Python client, unmodified, over a real port: what it calls works, what it raises is right."""

from collections.abc import AsyncIterator

import openai
import pytest
from openai import AsyncOpenAI

from services.errors import ContextTooLong, DependencyAway, Overloaded
from tests.support.parrot import MODEL, Parrot

SAID = [{"role": "user", "content": "one two three"}]


@pytest.fixture
async def client(live_url: str) -> AsyncIterator[AsyncOpenAI]:
    """The client as its users make it."""
    async with AsyncOpenAI(base_url=f"{live_url}/v1", api_key="none", max_retries=0) as made:
        yield made


async def test_models_are_listed(client: AsyncOpenAI) -> None:
    """The texts' models, and the live bundle as a model; each is found by its id."""
    listed = [model.id async for model in client.models.list()]
    found = await client.models.retrieve("tailrace-recommender")

    assert listed == [MODEL, "tailrace-recommender"]
    assert (found.owned_by, found.object) == ("tailrace", "model")


async def test_a_chat(client: AsyncOpenAI) -> None:
    """Role, text, finish reason and usage, cached tokens included."""
    answer = await client.chat.completions.create(model=MODEL, messages=SAID, max_tokens=4)

    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", " one two three one")
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 4, 7)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


async def test_a_streamed_chat(client: AsyncOpenAI) -> None:
    """The role comes first, then the text in pieces, the finish reason, and the usage last."""
    stream = await client.chat.completions.create(
        model=MODEL, messages=SAID, max_completion_tokens=3, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]

    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == " one two three"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None, None, None, "length"]
    assert (chunks[-1].choices, chunks[-1].usage and chunks[-1].usage.total_tokens) == ([], 6)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_chat_logprobs(client: AsyncOpenAI) -> None:
    """Each token with its bytes, its logprob and the most probable ones."""
    answer = await client.chat.completions.create(
        model=MODEL, messages=SAID, max_tokens=2, logprobs=True, top_logprobs=2
    )

    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [(one.token, one.logprob) for one in logprobs.content] == [(" one", -0.5), (" two", -0.5)]
    assert bytes(logprobs.content[0].bytes or []) == b" one"
    assert [top.token for top in logprobs.content[0].top_logprobs] == [" one", " ONE"]


async def test_a_completion_with_several_prompts_and_choices(client: AsyncOpenAI) -> None:
    """Choice c of prompt p has the index p * n + c; echo puts the prompt before each."""
    answer = await client.completions.create(model=MODEL, prompt=["a b", "c"], n=2, max_tokens=2, echo=True)

    assert [(one.index, one.text) for one in answer.choices] == [
        (0, "a b a b"),
        (1, "a b a b"),
        (2, "c c c"),
        (3, "c c c"),
    ]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 8)


async def test_a_streamed_completion_with_logprobs(client: AsyncOpenAI) -> None:
    """The four lists of each chunk, offsets counted through the whole choice."""
    stream = await client.completions.create(
        model=MODEL, prompt=[7, 8], max_tokens=2, logprobs=2, stream=True, stop=["nowhere"]
    )
    chunks = [chunk.choices[0] async for chunk in stream]

    assert "".join(chunk.text for chunk in chunks) == " t7 t8"
    assert [chunk.logprobs and chunk.logprobs.text_offset for chunk in chunks] == [[0], [3]]
    assert chunks[0].logprobs is not None
    assert chunks[0].logprobs.top_logprobs == [{" t7": -0.5, " T7": -1.5}]


async def test_a_history_is_ranked(client: AsyncOpenAI) -> None:
    """The recommender's choices are items, best first, their logprobs the scores; seen items are left out."""
    answer = await client.completions.create(model="tailrace-recommender", prompt="i00 i01 i02", n=3, logprobs=0)

    assert [choice.text for choice in answer.choices] == ["i04", "i05", "i06"]
    assert [choice.logprobs and choice.logprobs.token_logprobs for choice in answer.choices] == [[-0.0], [-1.0], [-2.0]]
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}


async def test_an_unknown_model_raises_not_found(client: AsyncOpenAI) -> None:
    """As the client's users expect."""
    with pytest.raises(openai.NotFoundError) as raised:
        await client.chat.completions.create(model="gpt-9", messages=SAID)

    assert raised.value.code == "model_not_found"


async def test_a_wrong_field_raises_bad_request_and_names_it(client: AsyncOpenAI) -> None:
    """The field is `param`."""
    with pytest.raises(openai.BadRequestError) as raised:
        await client.chat.completions.create(model=MODEL, messages=SAID, temperature=9)

    assert (raised.value.param, raised.value.type) == ("temperature", "invalid_request_error")


@pytest.mark.parametrize("param", ["messages", "max_tokens"])
async def test_a_prompt_longer_than_the_context_has_openais_code(
    client: AsyncOpenAI, parrot: Parrot, param: str
) -> None:
    """By which clients know to shorten a conversation; `param` is what does not fit."""
    parrot.error = ContextTooLong(param, "9 tokens long", "send at most 8")

    with pytest.raises(openai.BadRequestError) as raised:
        await client.chat.completions.create(model=MODEL, messages=SAID)

    assert (raised.value.code, raised.value.param) == ("context_length_exceeded", param)
    assert raised.value.type == "invalid_request_error"


async def test_no_place_raises_rate_limit(client: AsyncOpenAI, parrot: Parrot) -> None:
    """With the time to come back."""
    parrot.error = Overloaded("text", 3)

    with pytest.raises(openai.RateLimitError) as raised:
        await client.chat.completions.create(model=MODEL, messages=SAID)

    assert raised.value.response.headers["retry-after"] == "3"


async def test_a_stream_that_breaks_raises_after_what_was_written(client: AsyncOpenAI, parrot: Parrot) -> None:
    """The pieces arrive, then the error does: a cut text is never taken for a whole one."""
    parrot.error, parrot.num_before_error = DependencyAway("text", 1), 2
    stream = await client.completions.create(model=MODEL, prompt="a b c", stream=True)

    pieces = [(await anext(stream)).choices[0].text for _ in range(2)]
    with pytest.raises(openai.APIError, match="text is away"):
        await anext(stream)

    assert pieces == [" a", " b"]
