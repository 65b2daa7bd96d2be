"""Writes one request: the engine's tokens into events for its caller, as batches of what came together.

A choice that reaches a stop string ends in the engine at once. Leaving early, for whatever reason, cancels what is left.
"""

from collections.abc import AsyncGenerator, Sequence

from services.contracts.text import FinishReason, TextBegan, TextDone, TextEvent
from services.errors import DeadlineExceeded, InvalidRequest
from services.llm.engine.outcome import Grown, Status
from services.llm.serving.engine_thread import EngineThread
from services.llm.serving.stream import Ended
from services.llm.text.model import TextPlan

_REASONS = {Status.DONE: FinishReason.STOP, Status.LENGTH: FinishReason.LENGTH, Status.LATE: FinishReason.DEADLINE}

Events = tuple[TextEvent, ...]


async def write(plan: TextPlan, thread: EngineThread, *, in_pieces: bool) -> AsyncGenerator[Events, None]:
    """Return the events of a request, in batches that are never empty.

    Raises what the engine refuses with, DeadlineExceeded where not one token came in time, InvalidRequest where a schema
    turned out too complex, DependencyAway when the engine breaks.
    """
    async with thread.open(len(plan.choices), plan.ask) as stream:
        writing = _Writing(plan, thread, stream.request_ids, in_pieces=in_pieces)
        while not writing.is_done:
            events = writing.take_in(await stream.take())
            if events:
                yield events


class _Writing:
    """The state of one request's choices."""

    def __init__(self, plan: TextPlan, thread: EngineThread, request_ids: Sequence[str], *, in_pieces: bool) -> None:
        self._plan = plan
        self._thread = thread
        self._in_pieces = in_pieces
        self._choices = dict(zip(request_ids, plan.choices, strict=True))
        self._masks = dict(zip(request_ids, plan.masks, strict=False))
        self._num_cached: int | None = None

    @property
    def is_done(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finish_reason is not None for choice in self._plan.choices)

    def take_in(self, news: Sequence[Grown | Ended]) -> Events:
        """Take what the engine brought and give what the caller is to hear of it."""
        events: list[TextEvent] = []
        for one in news:
            if isinstance(one, Grown):
                events += self._began(one)
                self._grow(one)
            else:
                self._end(one)
        events += self._pieces()
        if self.is_done:
            events.append(self._done())
        return tuple(events)

    def _began(self, grown: Grown) -> list[TextEvent]:
        if self._num_cached is not None:
            return []
        self._num_cached = grown.num_cached_tokens
        return [TextBegan(num_prompt_tokens=self._plan.num_prompt_tokens, num_cached_tokens=self._num_cached)]

    def _grow(self, grown: Grown) -> None:
        if self._choices[grown.request_id].grow(grown.chosen):
            self._thread.finish(grown.request_id)

    def _end(self, ended: Ended) -> None:
        if self._num_cached is None:
            raise DeadlineExceeded("text")
        request_id = ended.outcome.request_id
        mask = self._masks.get(request_id)
        if mask is not None and mask.failure is not None:
            raise InvalidRequest("response_format", f"too complex ({mask.failure})", "send a simpler schema")
        self._choices[request_id].end(_REASONS[ended.outcome.status])

    def _pieces(self) -> list[TextEvent]:
        ready = (choice for choice in self._plan.choices if self._in_pieces or choice.finish_reason is not None)
        return [piece for choice in ready if (piece := choice.take_piece()) is not None]

    def _done(self) -> TextDone:
        return TextDone(
            num_prompt_tokens=self._plan.num_prompt_tokens,
            num_cached_tokens=self._num_cached or 0,
            num_completion_tokens=sum(choice.num_tokens for choice in self._plan.choices),
        )
