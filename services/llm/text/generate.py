"""Generates one request's text: the engine's tokens become pieces of text and events for the caller.

Text is complete UTF-8: bytes that may begin a character are held back until the rest arrives, and so is text that may
begin a stop string. A choice that reaches a stop string ends immediately in the engine. Closing the generator cancels
the remaining choices.
"""

import codecs
import math
from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass, replace

from services.contracts.text import FinishReason, TextBegan, TextDone, TextEvent, TextPiece, TokenLogprob
from services.errors import DeadlineExceeded, DependencyUnavailable, InvalidRequest, SchemaViolated
from services.llm.engine.outcome import NewToken, SequenceStatus
from services.llm.engine.sampling_parameters import SampledToken
from services.llm.serving.engine_thread import AddRequests, EngineThread
from services.llm.serving.streams import FinishedRequest
from services.llm.text.guided_decoding import JsonMask
from services.llm.text.tokenizer import TextTokenizer

_RETRY_AFTER_S = 1.0
_LEAST_LOGPROB = -9999.0
"""Replaces minus infinity, as in OpenAI and vLLM."""
_REASONS = {
    SequenceStatus.DONE: FinishReason.STOP,
    SequenceStatus.LENGTH: FinishReason.LENGTH,
    SequenceStatus.LATE: FinishReason.DEADLINE,
}

Events = tuple[TextEvent, ...]


class TextChoice:
    """Choice `index` of a request. Stop tokens end it and are not shown; `finish_reason` is None until it ends."""

    def __init__(
        self, index: int, tokenizer: TextTokenizer, *, stop: Collection[str], stop_token_ids: Collection[int]
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._tokenizer = tokenizer
        self._stop_token_ids = stop_token_ids
        self._stops = StopStrings(tuple(stop))
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_decoded = 0
        self._text = self._sent = ""
        self._logprobs: list[TokenLogprob] = []
        self._num_tokens_sent = 0
        self._has_sent_end = False

    @property
    def text(self) -> str:
        """The text so far, without the held-back part."""
        return self._sent + self._text

    def append(self, sampled: SampledToken) -> bool:
        """Append a token and return whether it completed a stop string. Tokens after the end are ignored."""
        if self.finish_reason is not None:
            return False
        self.num_tokens += 1
        if sampled.token_id in self._stop_token_ids:
            return False
        if sampled.logprob is not None:
            self._logprobs.append(self._logprob_of(sampled))
        text = self._decoder.decode(self._tokenizer.shown_bytes(sampled.token_id))
        self._num_decoded += len(text)
        self._show(text)
        return self._stops.has_stopped

    def end(self, reason: FinishReason) -> None:
        """End the choice, unless a stop string has ended it already, and release the held-back text."""
        if self.finish_reason is None:
            self._show(self._decoder.decode(b"", final=True))
        if self.finish_reason is None:
            self._text += self._stops.flush()
            self.finish_reason = reason

    def take_piece(self) -> TextPiece | None:
        """Return the changes since the last call; None if a caller would see no difference."""
        is_last = self.finish_reason is not None and not self._has_sent_end
        if not (self._text or self._logprobs or is_last):
            return None
        piece = TextPiece(
            index=self.index,
            text=self._text,
            num_tokens=self.num_tokens - self._num_tokens_sent,
            logprobs=tuple(self._logprobs),
            finish_reason=self.finish_reason,
        )
        self._sent += self._text
        self._text, self._logprobs = "", []
        self._num_tokens_sent, self._has_sent_end = self.num_tokens, is_last
        return piece

    def _show(self, text: str) -> None:
        self._text += self._stops.feed(text)
        if self._stops.has_stopped:
            self.finish_reason = FinishReason.STOP

    def _logprob_of(self, sampled: SampledToken) -> TokenLogprob:
        top = tuple(self._token(token_id, logprob) for token_id, logprob in sampled.top)
        own = self._token(sampled.token_id, sampled.logprob or 0.0)
        return replace(own, top=top, text_offset=self._num_decoded)

    def _token(self, token_id: int, logprob: float) -> TokenLogprob:
        token_bytes = self._tokenizer.bytes_of(token_id)
        text = token_bytes.decode(errors="replace")
        return TokenLogprob(token=text, token_bytes=token_bytes, logprob=_finite(logprob))


def _finite(logprob: float) -> float:
    """Return a logprob representable in JSON. Raises DependencyUnavailable if the model computed none."""
    if math.isnan(logprob):
        raise DependencyUnavailable("the model, whose logits are not numbers,", _RETRY_AFTER_S)
    return max(logprob, _LEAST_LOGPROB)


class StopStrings:
    """Ends a text at the first of its stop strings; text that may be the beginning of a stop string is held back.

    The text ends where the first stop string is complete; of several that are complete at the same position, at the
    longest. So the cut does not depend on the pieces.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(string for string in stop if string)
        self._held = ""
        self.has_stopped = False

    def feed(self, text: str) -> str:
        """Add text and return the part that is certain to be before any stop string; empty after the stop."""
        if self.has_stopped:
            return ""
        text, self._held = self._held + text, ""
        matches = [(text.find(string) + len(string), text.find(string)) for string in self._stop if string in text]
        if matches:
            self.has_stopped = True
            return text[: min(matches)[1]]
        num_held = max((_num_begun(text, string) for string in self._stop), default=0)
        shown = len(text) - num_held
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """Return the held-back text if the text ended before a stop string was complete."""
        held, self._held = self._held, ""
        return held


def _num_begun(text: str, string: str) -> int:
    """Count the characters at the end of the text that are the beginning of the string."""
    longest = min(len(text), len(string) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(string[:length])), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPlan:
    """A request ready to run: the call that adds it to the engine, its choices, and their masks for a JSON schema."""

    add: AddRequests
    choices: tuple[TextChoice, ...]
    masks: tuple[JsonMask, ...]
    num_prompt_tokens: int


async def generate(plan: TextPlan, thread: EngineThread, *, in_pieces: bool) -> AsyncGenerator[Events, None]:
    """Yield the events of a request, in non-empty batches.

    Raises:
        TailraceError: The engine refused the request.
        DeadlineExceeded: No token was generated in time.
        InvalidRequest: The JSON schema is too complex.
        SchemaViolated: A finished choice violates its JSON schema.
        DependencyUnavailable: The engine failed.
    """
    async with thread.open_stream(len(plan.choices), plan.add) as stream:
        generation = _Generation(plan, thread, stream.request_ids, in_pieces=in_pieces)
        while not generation.is_done:
            events = generation.events_of(await stream.take())
            if events:
                yield events


class _Generation:
    """The state of one request's choices."""

    def __init__(self, plan: TextPlan, thread: EngineThread, request_ids: Sequence[str], *, in_pieces: bool) -> None:
        self._plan = plan
        self._thread = thread
        self._in_pieces = in_pieces
        self._choices = dict(zip(request_ids, plan.choices, strict=True))
        self._masks = dict(zip(request_ids, plan.masks, strict=False))
        self._num_cached_tokens: int | None = None

    @property
    def is_done(self) -> bool:
        return all(choice.finish_reason is not None for choice in self._plan.choices)

    def events_of(self, items: Sequence[NewToken | FinishedRequest]) -> Events:
        """Apply the engine's results and return the events for the caller."""
        events: list[TextEvent] = []
        for item in items:
            if isinstance(item, NewToken):
                events += self._began(item)
                self._append(item)
            else:
                self._end(item)
        events += self._pieces()
        if self.is_done:
            events.append(self._done())
        return tuple(events)

    def _began(self, token: NewToken) -> list[TextEvent]:
        if self._num_cached_tokens is not None:
            return []
        self._num_cached_tokens = token.num_cached_tokens
        return [TextBegan(num_prompt_tokens=self._plan.num_prompt_tokens, num_cached_tokens=token.num_cached_tokens)]

    def _append(self, token: NewToken) -> None:
        if self._choices[token.request_id].append(token.sampled):
            self._thread.finish(token.request_id)

    def _end(self, ended: FinishedRequest) -> None:
        request_id = ended.outcome.request_id
        choice, mask = self._choices[request_id], self._masks.get(request_id)
        if mask is not None and mask.failure is not None:
            raise InvalidRequest("response_format", f"too complex ({mask.failure})", "send a simpler schema")
        if self._num_cached_tokens is None:
            raise DeadlineExceeded("text")
        is_cut = choice.finish_reason is not None or ended.outcome.status is not SequenceStatus.DONE
        choice.end(_REASONS[ended.outcome.status])
        if mask is not None and mask.is_complete and not is_cut:
            violation = mask.violation_of(choice.text)
            if violation is not None:
                raise SchemaViolated(violation)

    def _pieces(self) -> list[TextEvent]:
        ready = (choice for choice in self._plan.choices if self._in_pieces or choice.finish_reason is not None)
        return [piece for choice in ready if (piece := choice.take_piece()) is not None]

    def _done(self) -> TextDone:
        return TextDone(
            num_prompt_tokens=self._plan.num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens or 0,
            num_completion_tokens=sum(choice.num_tokens for choice in self._plan.choices),
        )
