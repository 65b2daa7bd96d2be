"""The text handle over a fake of Ray's handle: dying replicas, and requests sent to the same replica."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from services.contracts.text import ChatMessage, FinishReason, TextBegan, TextDone, TextEvent, TextPiece, TextRequest
from services.errors import DependencyUnavailable
from services.llm.handles import TextHandle, session_of

BEGAN = TextBegan(num_prompt_tokens=3)
PIECE = TextPiece(index=0, text="x", num_tokens=1, finish_reason=FinishReason.STOP)
DONE = TextDone(num_prompt_tokens=3, num_cached_tokens=0, num_completion_tokens=1)
BUDGET_S = 5.0
WHOLE = [(BEGAN,), (PIECE, DONE)]

Batches = Sequence[tuple[TextEvent, ...]]


class Response:
    """An attempt: yields its batches, then raises unless they end the text."""

    def __init__(self, batches: Batches) -> None:
        self._batches = iter(batches)
        self.is_cancelled = False

    def __aiter__(self) -> AsyncIterator[tuple[TextEvent, ...]]:
        return self

    async def __anext__(self) -> tuple[TextEvent, ...]:
        for batch in self._batches:
            return batch
        raise ActorDiedError

    def cancel(self) -> None:
        self.is_cancelled = True


class Handle:
    """Returns one response after another and records the session ids."""

    def __init__(self, *tries: Batches) -> None:
        self.left = [Response(batches) for batches in tries]
        self.sessions: list[str] = []

    def options(self, **fields: Any) -> "Handle":
        """Record the session id."""
        self.sessions += [fields["session_id"]] if "session_id" in fields else []
        return self

    def remote(self, _request: TextRequest, budget_s: float) -> Response:
        """Return the next response."""
        assert 0 < budget_s <= BUDGET_S
        return self.left.pop(0)


async def events_of(handle: Handle) -> list[TextEvent]:
    """Return all events of a text."""
    text = TextHandle(handle, default_deadline_s=BUDGET_S)
    return [event async for event in text.write(TextRequest(request_id="r", model="m", prompt="p"))]


@pytest.mark.parametrize("before", [[], [[]], [[], []], [[(BEGAN,)]], [[(BEGAN,)], []]])
async def test_a_text_without_tokens_is_retried_at_another_replica(before: list[Batches]) -> None:
    """The caller receives a single text with a single begin event."""
    handle = Handle(*before, WHOLE)

    assert await events_of(handle) == [BEGAN, PIECE, DONE]
    assert handle.left == []
    assert len(handle.sessions) == 1


@pytest.mark.parametrize("attempts", [[[(BEGAN, PIECE)]], [[], [], []]])
async def test_a_text_with_tokens_and_a_third_failure_are_not_retried(attempts: list[Batches]) -> None:
    """Another replica would generate another text, and retries are limited."""
    handle = Handle(*attempts, WHOLE)

    with pytest.raises(DependencyUnavailable):
        await events_of(handle)
    assert len(handle.left) == 1


def chat(*turns: tuple[str, str], **fields) -> TextRequest:
    """Build a request with these turns."""
    messages = tuple(ChatMessage(role=role, content=content) for role, content in turns)
    return TextRequest(request_id="r", model="m", messages=messages, **fields)


def prompt(value: str | tuple[int, ...], **fields) -> TextRequest:
    return TextRequest(request_id="r", model="m", prompt=value, **fields)


def test_a_conversation_keeps_its_session_and_others_have_others() -> None:
    """Later turns and sampling settings keep the session; content, roles, turn borders, key and salt determine it."""
    begun = ("system", "be brief"), ("user", "hello")
    requests = [
        chat(*begun),
        chat(("system", "be brief"), ("user", "hello!")),
        chat(("system", "be long"), ("user", "hello")),
        chat(("user", "be brief"), ("user", "hello")),
        chat(("system", "be briefhello"), ("user", "")),
        chat(("system", "be brief")),
        prompt("be brief"),
        prompt("be brief", key_id="shop"),
        prompt("be brief", key_id="shop", cache_salt="s"),
        prompt(()),
    ]

    assert session_of(chat(*begun, ("assistant", "hi"), ("user", "and now?"), n=3)) == session_of(requests[0])
    assert len({session_of(request) for request in requests}) == len(requests)


def test_the_session_of_a_prompt_depends_on_its_beginning() -> None:
    """The first 256 characters of text or 64 token ids count; a lone surrogate is accepted."""
    assert session_of(prompt("x" * 256)) == session_of(prompt("x" * 256 + "y"))
    assert session_of(prompt("x" * 255)) != session_of(prompt("x" * 255 + "y"))
    assert session_of(prompt((7,) * 64)) == session_of(prompt((7,) * 64 + (8,)))
    assert session_of(prompt((1, 23))) != session_of(prompt((12, 3)))
    assert session_of(prompt("\ud800"))
