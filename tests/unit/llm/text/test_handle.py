"""What becomes of a text whose replica dies, over a handle that acts as Ray's. `pytest tests/unit/llm/text/test_handle.py`."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from services.contracts.text import FinishReason, TextBegan, TextDone, TextEvent, TextPiece, TextRequest
from services.errors import DependencyAway
from services.llm.text.handle import TextHandle

BEGAN = TextBegan(num_prompt_tokens=3)
PIECE = TextPiece(index=0, text="x", num_tokens=1, finish_reason=FinishReason.STOP)
DONE = TextDone(num_prompt_tokens=3, num_cached_tokens=0, num_completion_tokens=1)
WHOLE = [(BEGAN,), (PIECE, DONE)]

Batches = Sequence[tuple[TextEvent, ...]]


class Response:
    """One try: gives its batches, then dies unless they end the text."""

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
        """Note that it was cancelled."""
        self.is_cancelled = True


class Handle:
    """Return one response after another and notes by which session it was asked."""

    def __init__(self, *tries: Batches) -> None:
        self.left = [Response(batches) for batches in tries]
        self.sessions: list[str] = []

    def options(self, **fields: Any) -> "Handle":
        """Take the options."""
        self.sessions += [fields["session_id"]] if "session_id" in fields else []
        return self

    def remote(self, _request: TextRequest) -> Response:
        """Begin the next try."""
        return self.left.pop(0)


async def events_of(handle: Handle) -> list[TextEvent]:
    """Write to the end."""
    text = TextHandle(handle, default_deadline_s=5.0)
    return [event async for event in text.write(TextRequest(request_id="r", model="m", prompt="p"))]


@pytest.mark.parametrize("before", [[], [[]], [[], []], [[(BEGAN,)]], [[(BEGAN,)], []]])
async def test_a_text_that_has_not_begun_is_asked_of_another(before: list[Batches]) -> None:
    """The listener hears one text, that began once."""
    handle = Handle(*before, WHOLE)

    assert await events_of(handle) == [BEGAN, PIECE, DONE]
    assert handle.left == []
    assert len(handle.sessions) == 1


async def test_a_text_that_has_begun_breaks_off() -> None:
    """Another replica would write another text."""
    handle = Handle([(BEGAN, PIECE)], WHOLE)

    with pytest.raises(DependencyAway):
        await events_of(handle)
    assert len(handle.left) == 1


async def test_tries_have_an_end() -> None:
    """Three replicas that die are enough."""
    handle = Handle([], [], [], WHOLE)

    with pytest.raises(DependencyAway):
        await events_of(handle)
    assert len(handle.left) == 1
