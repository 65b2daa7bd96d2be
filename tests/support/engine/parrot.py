"""A small TextWriter that repeats the prompt's words, a token each. Deterministic; can be slow or fail."""

import asyncio
from collections.abc import AsyncGenerator
from itertools import cycle, islice

from services.contracts.text import (
    FinishReason,
    TextBegan,
    TextDone,
    TextEvent,
    TextModel,
    TextPiece,
    TextRequest,
    TokenLogprob,
)
from services.errors import NotFound

MODEL = "parrot"
NUM_CACHED = 1


class Parrot:
    """Repeats the last message or the prompt, each word after a space, up to `max_tokens` (8 by default).

    A stop string ends a choice before it. Logprobs are -0.5 for the word and -1.5 for it in capitals. `error` is raised
    after `num_before_error` pieces, `delay_s` is slept before each piece, after `hangs_after` pieces no more follow.
    """

    def __init__(self) -> None:
        self.requests: list[TextRequest] = []
        self.num_open = 0
        self.num_steps = 0
        self.delay_s = 0.0
        self.error: Exception | None = None
        self.num_before_error = 0
        self.hangs_after: int | None = None
        self.template_variables: frozenset[str] = frozenset()
        self.name = MODEL

    async def models(self) -> tuple[TextModel, ...]:
        """Return the only model."""
        if self.error is not None:
            raise self.error
        known = self.template_variables
        return (
            TextModel(name=self.name, max_context_tokens=256, created_unix_s=1_700_000_000, template_variables=known),
        )

    async def write(self, request: TextRequest) -> AsyncGenerator[TextEvent, None]:
        """Generate text; see TextWriter."""
        self.requests.append(request)
        self.num_open += 1
        try:
            async for event in self._write(request):
                yield event
        finally:
            self.num_open -= 1

    async def _write(self, request: TextRequest) -> AsyncGenerator[TextEvent, None]:
        if request.model != self.name:
            raise NotFound(f"there is no model {request.model!r}", f"ask {self.name}")
        words = words_of(request)
        num_tokens = 8 if request.max_tokens is None else request.max_tokens
        num_written = 0
        await self._step(0)
        yield TextBegan(num_prompt_tokens=len(words), num_cached_tokens=NUM_CACHED)
        open_choices, offset = set(range(request.n)), 0
        for number, word in enumerate(islice(cycle(words), num_tokens), 1):
            for index in sorted(open_choices):
                await self._step(num_written)
                is_stop = any(stop in f" {word}" for stop in request.stop)
                is_last = is_stop or number == num_tokens
                num_written += not is_stop
                if is_last:
                    open_choices.discard(index)
                yield piece_of(request, index, word, offset, is_stop=is_stop, is_last=is_last)
            offset += len(f" {word}")
        yield TextDone(num_prompt_tokens=len(words), num_cached_tokens=NUM_CACHED, num_completion_tokens=num_written)

    async def _step(self, num_written: int) -> None:
        self.num_steps += 1
        await asyncio.sleep(self.delay_s)
        if self.error is not None and num_written >= self.num_before_error:
            raise self.error
        if self.hangs_after is not None and num_written >= self.hangs_after:
            await asyncio.Event().wait()


def words_of(request: TextRequest) -> list[str]:
    """Return the words to repeat."""
    if request.messages:
        return request.messages[-1].content.split()
    if isinstance(request.prompt, str):
        return request.prompt.split()
    return [f"t{token}" for token in request.prompt or ()]


def piece_of(request: TextRequest, index: int, word: str, offset: int, *, is_stop: bool, is_last: bool) -> TextPiece:
    """Build the piece of one word."""
    reason = (FinishReason.STOP if is_stop else FinishReason.LENGTH) if is_last else None
    if is_stop:
        return TextPiece(index=index, text="", num_tokens=0, finish_reason=reason)
    num_top = request.sampling.num_logprobs
    token = f" {word}"
    ranked = [(token, -0.5), (token.upper(), -1.5)][: num_top or 0]
    top = tuple(TokenLogprob(token=text, token_bytes=text.encode(), logprob=value) for text, value in ranked)
    logprob = TokenLogprob(token=token, token_bytes=token.encode(), logprob=-0.5, top=top, text_offset=offset)
    logprobs = () if num_top is None else (logprob,)
    return TextPiece(index=index, text=token, num_tokens=1, logprobs=logprobs, finish_reason=reason)
