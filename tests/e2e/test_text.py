"""Text on a whole stack with API keys, with a tiny random checkpoint: the openai client, schemas, disconnects, and deadlines beside it."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.e2e.test_docs import PageSession
from tests.support.checkpoints import write_checkpoint
from tests.support.pages import ROOT, blocks
from tests.support.servers import HOST
from tests.support.stack import Stack
from tests.support.wait import wait_for

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # httpx's, of a stream left open

MODEL = "tiny"
MAX_TOKENS = 3_500
MESSAGES: list[Any] = [{"role": "user", "content": "the river runs on"}]
SEEN = ["50", "181", "258"]
NUM_FLOODING, NUM_REQUESTS, DEADLINE_MS = 12, 60, 500


@dataclass
class Texts:
    """A stack that serves text, and its keys by id."""

    stack: Stack
    keys: dict[str, str]

    def client(self, key_id: str) -> OpenAI:
        """Return an openai client without retries."""
        url = f"http://{HOST}:{self.stack.settings.http_port}/v1"
        return OpenAI(base_url=url, api_key=self.keys[key_id], max_retries=0)

    def recommend(self, **fields: Any) -> dict[str, Any]:
        """Return a recommendation."""
        headers = {"authorization": f"Bearer {self.keys['shop']}"}
        answer = self.stack.rest.post("/v1/recommendations", json=fields, headers=headers)
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        return body


@pytest.fixture(scope="module")
def texts(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Texts]:
    """A stack beside the shared one, with a copy of its bundle."""
    folder = tmp_path_factory.mktemp("texts")
    running = stack.beside(
        folder,
        text_path=str(write_checkpoint(folder / MODEL, max_positions=4_096)),
        text_max_tokens=MAX_TOKENS,
        api_keys_file=folder / "keys.json",
        gateway_replicas=1,
    )
    keys = {"writer": running.new_key("writer", "text"), "shop": running.new_key("shop", "recommend")}
    try:
        running.start()
        yield Texts(running, keys)
    finally:
        running.close()


def test_a_chat_is_the_same_whole_and_streamed(texts: Texts) -> None:
    """Greedy text is equal; the usage counts the prompt as the chat template renders it."""
    client = texts.client("writer")
    request: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24, "temperature": 0}

    whole = client.chat.completions.create(**request)
    chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))

    streamed = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert streamed == whole.choices[0].message.content
    assert 0 < whole.usage.completion_tokens <= 24
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens > 4


def test_a_schema_holds(texts: Texts) -> None:
    """Even a random model generates only what the schema allows."""
    schema = {
        "type": "object",
        "properties": {"flow": {"enum": ["head", "tail"]}},
        "required": ["flow"],
        "additionalProperties": False,
    }
    answer = texts.client("writer").chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=200,
        seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "flow", "schema": schema}},
    )

    assert json.loads(answer.choices[0].message.content or "")["flow"] in {"head", "tail"}


def test_a_disconnect_ends_the_engines_work(texts: Texts) -> None:
    """Through the edge and Ray, a client's disconnect cancels its sequence in the engine."""
    stack = texts.stack
    stream = texts.client("writer").completions.create(
        model=MODEL, prompt="the tail", max_tokens=MAX_TOKENS, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert stack.metric("tailrace_text_in_flight") == 1
    stream.close()

    wait_for(lambda: stack.metric("tailrace_text_in_flight") == 0, what="the end of the text at the door")
    wait_for(
        lambda: stack.metric("vllm:num_requests_running", model_name=MODEL) == 0,
        what="the end of the text at the engine",
    )
    assert stack.metric("tailrace_text_requests_total", code="cancelled") == 1
    assert stack.metric("tailrace_text_tokens_total", kind="completion") < MAX_TOKENS


def test_a_recommendation_can_have_a_rationale(texts: Texts) -> None:
    """It is written if time allows; the items come in any case."""
    ample = texts.recommend(recent_item_ids=SEEN, k=3, deadline_ms=4_000, rationale=True)
    tight = texts.recommend(recent_item_ids=SEEN, k=3, deadline_ms=5, rationale=True)

    assert (ample["rationale_reason"], len(ample["items"])) == ("written", 3)
    assert ample["rationale"]
    assert (tight["rationale_reason"], len(tight["items"])) == ("late", 3)
    assert "rationale" not in tight


def test_the_examples_of_the_page_work(texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each example of docs/text.md has the shown output."""
    monkeypatch.setenv("KEY", texts.keys["writer"])
    session = PageSession(texts.stack, tmp_path)

    failures = [
        failure
        for block in blocks((ROOT / "docs/text.md").read_text())
        if block.mark == "text"
        for failure in session.run(block)
    ]

    assert failures == []


def test_recommendations_keep_their_deadline_while_text_is_flooded(texts: Texts) -> None:
    """All are answered, and at most one in twenty is late."""
    is_over = threading.Event()

    def flood() -> None:
        client = texts.client("writer")
        while not is_over.is_set():
            try:
                stream = client.completions.create(
                    model=MODEL, prompt="the tail", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
                )
                while not is_over.is_set() and next(stream, None):
                    pass
                stream.close()
            except openai.RateLimitError:
                is_over.wait(0.1)

    flooding = [threading.Thread(target=flood, daemon=True) for _ in range(NUM_FLOODING)]
    for one in flooding:
        one.start()
    stack = texts.stack
    wait_for(lambda: stack.metric("tailrace_text_in_flight") >= NUM_FLOODING / 2, what="the flood")
    missed_before = stack.metric("tailrace_deadline_missed_total")
    try:
        answers = [
            texts.recommend(recent_item_ids=[*SEEN, str(300 + place)], k=5, deadline_ms=DEADLINE_MS)
            for place in range(NUM_REQUESTS)
        ]
    finally:
        is_over.set()
        for one in flooding:
            one.join(20)

    assert all(len(answer["items"]) == 5 for answer in answers)
    assert stack.metric("tailrace_deadline_missed_total") - missed_before <= 0.05 * NUM_REQUESTS
