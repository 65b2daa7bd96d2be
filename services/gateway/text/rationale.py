"""The rationale: one sentence that explains the items, written within the rest of a recommendation's deadline.

    titles of history and items ─▶ prompt ─▶ text tier ─▶ the first sentence, or the reason for its absence

The items wait for it at most that long; it has low priority and few tokens. A failure here is an outcome, not an error.
Knows no recommendation, only titles.
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
"""Chat-template variable of Qwen3 and later models that enables reasoning; a rationale's deadline is too short for
it."""
MIN_TIMEOUT_S = 0.02
"""With less time left than this, the writer is not called."""
_SENTENCE = re.compile(r".*?[.!?](?=\s|$)", re.DOTALL)
_TASK = "Answer with one short sentence."


class RationaleWriter:
    """Requests rationales. Writes no rationales without a text tier."""

    def __init__(self, tier: TextTier | None, outcomes: Counter, wall_clock: Callable[[], float] = time.time) -> None:
        self._tier = tier
        self._outcomes = outcomes
        self._wall_clock = wall_clock
        self._model: TextModel | None = None

    async def __call__(self, seen: Sequence[str], shown: Sequence[str], timeout_s: float) -> Rationale:
        """Return why a user with this history of titles (oldest first) gets those (best first). Never raises.

        Returns within `timeout_s` seconds.
        """
        rationale = await self._within(seen, shown, timeout_s)
        self._outcomes.labels(rationale.outcome.value).inc()
        return rationale

    async def _within(self, seen: Sequence[str], shown: Sequence[str], timeout_s: float) -> Rationale:
        if self._tier is None or not shown:
            return Rationale(RationaleOutcome.NO_TEXT)
        if timeout_s < MIN_TIMEOUT_S:
            return Rationale(RationaleOutcome.LATE)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._write(self._tier, prompt_of(seen, shown), timeout_s)
        except Exception as error:  # noqa: BLE001 - the items are sent despite any failure of the writer
            return Rationale(_outcome_of(error))

    async def _write(self, tier: TextTier, prompt: str, timeout_s: float) -> Rationale:
        deadline_unix_s = self._wall_clock() + timeout_s
        if self._model is None:
            models = await tier.models()
            if not models:
                return Rationale(RationaleOutcome.NO_TEXT)
            self._model = models[0]
        request = _request(self._model, prompt, deadline_unix_s)
        text = ""
        try:
            async with aclosing(tier.write(request, RATIONALE)) as events:
                async for event in events:
                    if isinstance(event, TextPiece):
                        text += event.text
                        if event.finish_reason is FinishReason.DEADLINE:
                            return Rationale(RationaleOutcome.LATE)
                        if (sentence := whole_sentence(text)) is not None:
                            return Rationale(RationaleOutcome.WRITTEN, sentence)
        except NotFound:
            self._model = None  # another model is served by now
            raise
        sentence = ended(text)
        return Rationale(RationaleOutcome.WRITTEN, sentence) if sentence else Rationale(RationaleOutcome.FAILED)


def prompt_of(seen: Sequence[str], shown: Sequence[str]) -> str:
    """Return the prompt with the newest titles of the history and the best recommended titles."""
    history = f"Someone liked: {'; '.join(seen[-NUM_TITLES:])}.\n" if seen else ""
    return f"{history}We recommend: {'; '.join(shown[:NUM_TITLES])}.\nWhy could they like it? {_TASK}"


def whole_sentence(text: str) -> str | None:
    """Return the first sentence once text follows it: until then `3.` may become `3.5`."""
    match = _SENTENCE.match(text.lstrip())
    if match is None or match.end() == len(text.lstrip()):
        return None
    return _tidy(match.group())


def ended(text: str) -> str:
    """Return a finished text: unchanged if it ends like a sentence, otherwise cut after its last whole word."""
    tidy = _tidy(text)
    return tidy if tidy.endswith((".", "!", "?")) or " " not in tidy else f"{tidy.rpartition(' ')[0]} …"


def _tidy(text: str) -> str:
    return " ".join(text.split())


def _request(model: TextModel, prompt: str, deadline_unix_s: float) -> TextRequest:
    chats = model.has_chat_template
    messages = (ChatMessage(role="user", content=prompt),)  # not every template has a system message
    return TextRequest(
        request_id=uuid.uuid4().hex,
        model=model.name,
        messages=messages if chats else (),
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
