"""One sentence that says why these items, asked of the text writer with what is left of a recommendation's deadline.

    titles of history and items ─▶ prompt ─▶ text tier, in a time box ─▶ the first sentence, or the reason why there is none

It is the last and the least thing that an answer waits for: low priority, few tokens, never beyond the box. Whatever happens
here is an outcome, not an error. Knows no recommendation, only titles.
"""

import asyncio
import re
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import aclosing

import structlog
from prometheus_client import Counter

from services.contracts.access import Priority
from services.contracts.recommend import Rationale, RationaleOutcome
from services.contracts.text import (
    ChatMessage,
    FinishReason,
    SamplingOptions,
    TextModel,
    TextPiece,
    TextRequest,
)
from services.errors import DeadlineExceeded, NotFound, Overloaded
from services.gateway.text.metrics import RATIONALE
from services.gateway.text.tier import TextTier
from services.observability.tracing import trace_headers

log = structlog.get_logger()

NUM_TITLES = 5
MAX_TOKENS = 40
_THINKS = "enable_thinking"
"""The variable by which Qwen3's template, and others after it, let the model think aloud first: there is no time for that."""
MIN_BOX_S = 0.02
"""With less than this left, nobody is asked."""
_SENTENCE = re.compile(r".*?[.!?](?=\s|$)", re.DOTALL)
_TASK = "Answer with one short sentence."


class RationaleWriter:
    """Asks for sentences. Without a tier, none is written."""

    def __init__(self, tier: TextTier | None, outcomes: Counter, wall_clock: Callable[[], float] = time.time) -> None:
        self._tier = tier
        self._outcomes = outcomes
        self._wall_clock = wall_clock
        self._model: TextModel | None = None

    async def __call__(self, seen: Sequence[str], shown: Sequence[str], box_s: float) -> Rationale:
        """Say why who has seen these titles (oldest first) is shown those (best first), within `box_s` seconds. Never raises."""
        rationale = await self._within(seen, shown, box_s)
        self._outcomes.labels(rationale.outcome.value).inc()
        return rationale

    async def _within(self, seen: Sequence[str], shown: Sequence[str], box_s: float) -> Rationale:
        if self._tier is None or not shown:
            return Rationale(RationaleOutcome.NO_TEXT)
        if box_s < MIN_BOX_S:
            return Rationale(RationaleOutcome.LATE)
        try:
            async with asyncio.timeout(box_s):
                return await self._ask(self._tier, prompt_of(seen, shown), box_s)
        except Exception as error:  # noqa: BLE001 - whatever the writer fails at, the items go out
            return Rationale(_outcome_of(error))

    async def _ask(self, tier: TextTier, prompt: str, box_s: float) -> Rationale:
        deadline_unix_s = self._wall_clock() + box_s
        if self._model is None:
            models = await tier.models()
            if not models:
                return Rationale(RationaleOutcome.NO_TEXT)
            self._model = models[0]
        asked = _request(self._model, prompt, deadline_unix_s)
        text = ""
        try:
            async with aclosing(tier.write(asked, RATIONALE)) as events:
                async for event in events:
                    if isinstance(event, TextPiece):
                        text += event.text
                        if event.finish_reason is FinishReason.DEADLINE:
                            return Rationale(RationaleOutcome.LATE)
                        if (sentence := whole_sentence(text)) is not None:
                            return Rationale(RationaleOutcome.WRITTEN, sentence)
        except NotFound:
            self._model = None  # another one is served by now
            raise
        sentence = ended(text)
        return Rationale(RationaleOutcome.WRITTEN, sentence) if sentence else Rationale(RationaleOutcome.FAILED)


def prompt_of(seen: Sequence[str], shown: Sequence[str]) -> str:
    """Put the question: the newest of what was seen, the best of what is shown."""
    history = f"Someone liked: {'; '.join(seen[-NUM_TITLES:])}.\n" if seen else ""
    return f"{history}We recommend: {'; '.join(shown[:NUM_TITLES])}.\nWhy could they like it? {_TASK}"


def whole_sentence(text: str) -> str | None:
    """Return the first sentence once something comes after it, since until then `3.` may become `3.5`."""
    found = _SENTENCE.match(text.lstrip())
    if found is None or found.end() == len(text.lstrip()):
        return None
    return _tidy(found.group())


def ended(text: str) -> str:
    """Return a text that is over: as it is when it ends like a sentence, or else cut behind its last whole word."""
    tidy = _tidy(text)
    return tidy if tidy.endswith((".", "!", "?")) or " " not in tidy else f"{tidy.rpartition(' ')[0]} …"


def _tidy(text: str) -> str:
    return " ".join(text.split())


def _request(model: TextModel, prompt: str, deadline_unix_s: float) -> TextRequest:
    chats = model.has_chat_template
    turns = (ChatMessage(role="user", content=prompt),)  # not every template has a place for a system's words
    return TextRequest(
        request_id=uuid.uuid4().hex,
        model=model.name,
        messages=turns if chats else (),
        chat_template_kwargs={_THINKS: False} if _THINKS in model.template_variables else {},
        prompt=None if chats else f"{prompt}\n",
        max_tokens=MAX_TOKENS,
        sampling=SamplingOptions(temperature=0.0),
        stop=("\n\n",),
        priority=Priority.LOW,
        deadline_unix_s=deadline_unix_s,
        trace=trace_headers(),
    )


def _outcome_of(error: Exception) -> RationaleOutcome:
    match error:
        case TimeoutError() | DeadlineExceeded():
            return RationaleOutcome.LATE
        case Overloaded():
            return RationaleOutcome.BUSY
        case _:
            log.warning("rationale_failed", error=repr(error))
            return RationaleOutcome.FAILED
