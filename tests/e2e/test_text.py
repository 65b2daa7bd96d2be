"""Text on the whole stack, from a tiny random checkpoint: the openai client, schemas, disconnects and deadlines."""

import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.support.stacks.stack import TEXT_MAX_TOKENS, TEXT_MODEL, Stack
from tests.support.wait import wait_for

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # from httpx, for a stream left open

MESSAGES: list[Any] = [{"role": "user", "content": "the river runs on"}]
SEEN = ["50", "181", "258"]
CANCELLED = ("tailrace_text_requests_total", {"code": "cancelled"})
WRITTEN = ("tailrace_text_tokens_total", {"kind": "completion"})
NUM_FLOODING, NUM_REQUESTS, DEADLINE_MS = 12, 60, 500


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{stack.rest.base_url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_chat_is_the_same_whole_and_streamed(client: OpenAI) -> None:
    """Greedy text is reproducible; the usage counts the prompt as the chat template renders it."""
    request: dict[str, Any] = {"model": TEXT_MODEL, "messages": MESSAGES, "max_tokens": 24, "temperature": 0}

    whole = client.chat.completions.create(**request)
    chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))

    streamed = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert streamed == whole.choices[0].message.content
    assert 0 < whole.usage.completion_tokens <= 24
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens > 4


def test_every_prompt_of_a_call_gets_its_text(client: OpenAI) -> None:
    """The prompts of a call run concurrently through Ray, and each gives the same text as in a separate call."""
    prompts = ["the river", "the tail", "on runs the"]
    request: dict[str, Any] = {"model": TEXT_MODEL, "max_tokens": 4, "temperature": 0}

    together = client.completions.create(**request, prompt=prompts)
    alone = [client.completions.create(**request, prompt=prompt).choices[0].text for prompt in prompts]

    assert [choice.text for choice in together.choices] == alone


def test_a_disconnect_ends_the_engines_work(client: OpenAI, stack: Stack) -> None:
    """A client's disconnect, through the edge and Ray, cancels its sequence in the engine."""
    cancelled, written = (stack.metric(name, **labels) for name, labels in (CANCELLED, WRITTEN))
    stream = client.completions.create(
        model=TEXT_MODEL, prompt="the tail", max_tokens=TEXT_MAX_TOKENS, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert stack.metric("tailrace_text_in_flight") == 1
    stream.close()

    wait_for(lambda: stack.metric("tailrace_text_in_flight") == 0, what="the end of the text at the door")
    wait_for(
        lambda: stack.metric("vllm:num_requests_running", model_name=TEXT_MODEL) == 0,
        what="the end of the text at the engine",
    )
    wait_for(lambda: stack.metric(CANCELLED[0], **CANCELLED[1]) == cancelled + 1, what="the cancelled text's count")
    assert stack.metric(WRITTEN[0], **WRITTEN[1]) < written + TEXT_MAX_TOKENS


def test_a_recommendation_can_have_a_rationale(stack: Stack) -> None:
    """The rationale is written if time allows; the items always come."""

    def written() -> dict[str, Any] | None:
        """Return an answer with a rationale; busy cores may need a second try."""
        answer = stack.recommend(recent_item_ids=SEEN, k=3, deadline_ms=4_000, rationale=True)
        return answer if answer["rationale_reason"] == "written" else None

    ample = wait_for(written, what="a rationale")
    tight = stack.recommend(recent_item_ids=SEEN, k=3, deadline_ms=5, rationale=True)

    assert len(ample["items"]) == 3
    assert ample["rationale"]
    assert (tight["rationale_reason"] in {"late", "busy"}, len(tight["items"])) == (True, 3)
    assert "rationale" not in tight


def test_recommendations_keep_their_deadline_while_text_is_flooded(client: OpenAI, stack: Stack) -> None:
    """All requests are answered, and at most one in twenty is late."""
    is_over = threading.Event()

    def flood() -> None:
        while not is_over.is_set():
            try:
                stream = client.completions.create(
                    model=TEXT_MODEL, prompt="the tail", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
                )
                while not is_over.is_set() and next(stream, None):
                    pass
                stream.close()
            except openai.RateLimitError:
                is_over.wait(0.1)

    flooding = [threading.Thread(target=flood, daemon=True) for _ in range(NUM_FLOODING)]
    for thread in flooding:
        thread.start()
    wait_for(lambda: stack.metric("tailrace_text_in_flight") >= NUM_FLOODING / 2, what="the flood")
    missed_before = stack.metric("tailrace_deadline_missed_total")
    try:
        answers = [
            stack.recommend(recent_item_ids=[*SEEN, str(300 + index)], k=5, deadline_ms=DEADLINE_MS)
            for index in range(NUM_REQUESTS)
        ]
    finally:
        is_over.set()
        for thread in flooding:
            thread.join(20)

    assert all(len(answer["items"]) == 5 for answer in answers)
    assert stack.metric("tailrace_deadline_missed_total") - missed_before <= 0.05 * NUM_REQUESTS
