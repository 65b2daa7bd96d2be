"""What the OpenAI door gives: chunks of a stream and whole answers, for completions and for chat. Pure; plain values for JSON.

A choice that its deadline ended has the finish reason `length`, which is OpenAI's nearest word, and the stop reason
`deadline` (the field is vLLM's).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from services.contracts.text import FinishReason, TextDone, TextPiece, TokenLogprob
from services.gateway.openai.logprobs import chat_logprobs, completion_logprobs

Plain = dict[str, Any]

DEADLINE = "deadline"


@dataclass(slots=True)
class Choice:
    """One choice, as far as it is written."""

    text: str = ""
    num_tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def take(self, piece: TextPiece) -> None:
        """Go on with this piece."""
        self.text += piece.text
        self.num_tokens += piece.num_tokens
        self.logprobs.extend(piece.logprobs)
        self.finish_reason = piece.finish_reason


class Shape(Protocol):
    """How one route tells its answers."""

    def opening(self, num_choices: int) -> Iterator[Plain]:
        """Return the chunks before any text."""
        ...

    def chunk(self, piece: TextPiece) -> Plain:
        """Return the chunk for one piece."""
        ...

    def whole(self, choices: list[Choice], usage: Plain) -> Plain:
        """Return the whole answer."""
        ...

    def usage_chunk(self, usage: Plain) -> Plain:
        """Return the last chunk, which has no choice."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What every chunk of an answer says. `num_logprobs` is as asked; None: none."""

    request_id: str
    created_unix_s: int
    model: str
    num_logprobs: int | None

    def plain(self, prefix: str, kind: str) -> Plain:
        """Return the fields before `choices`."""
        made = {"id": f"{prefix}-{self.request_id}", "object": kind, "created": self.created_unix_s}
        return {**made, "model": self.model, "system_fingerprint": None}


class CompletionShape:
    """Answers of /v1/completions. `echoes` are the prompts that are given again, by choice."""

    def __init__(self, head: Head, echoes: dict[int, str]) -> None:
        self._head = head
        self._plain = head.plain("cmpl", "text_completion")
        self._echoes = echoes

    def opening(self, num_choices: int) -> Iterator[Plain]:
        """Return the prompts again, where that was asked."""
        for index in range(num_choices):
            if echo := self._echoes.get(index):
                yield self.chunk(TextPiece(index=index, text=echo, num_tokens=0))

    def chunk(self, piece: TextPiece) -> Plain:
        """See Shape."""
        return {**self._plain, "choices": [self._choice(piece.index, piece.text, piece)]}

    def whole(self, choices: list[Choice], usage: Plain) -> Plain:
        """See Shape."""
        made = [self._choice(i, self._echoes.get(i, "") + one.text, one) for i, one in enumerate(choices)]
        return {**self._plain, "choices": made, "usage": usage}

    def usage_chunk(self, usage: Plain) -> Plain:
        """See Shape."""
        return {**self._plain, "choices": [], "usage": usage}

    def _choice(self, index: int, text: str, said: TextPiece | Choice) -> Plain:
        num_top = self._head.num_logprobs
        logprobs = None if num_top is None else completion_logprobs(said.logprobs, num_top)
        return {"index": index, "text": text, "logprobs": logprobs, **finish(said.finish_reason)}


class ChatShape:
    """Answers of /v1/chat/completions."""

    def __init__(self, head: Head) -> None:
        self._with_logprobs = head.num_logprobs is not None
        self._whole = head.plain("chatcmpl", "chat.completion")
        self._chunk = head.plain("chatcmpl", "chat.completion.chunk")

    def opening(self, num_choices: int) -> Iterator[Plain]:
        """Say who speaks."""
        for index in range(num_choices):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            yield {**self._chunk, "choices": [choice]}

    def chunk(self, piece: TextPiece) -> Plain:
        """See Shape."""
        delta = {"content": piece.text} if piece.text else {}
        told = {"index": piece.index, "delta": delta, "logprobs": self._logprobs(piece), **finish(piece.finish_reason)}
        return {**self._chunk, "choices": [told]}

    def whole(self, choices: list[Choice], usage: Plain) -> Plain:
        """See Shape."""
        made = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self._logprobs(choice),
                **finish(choice.finish_reason),
            }
            for index, choice in enumerate(choices)
        ]
        return {**self._whole, "choices": made, "usage": usage}

    def usage_chunk(self, usage: Plain) -> Plain:
        """See Shape."""
        return {**self._chunk, "choices": [], "usage": usage}

    def _logprobs(self, said: TextPiece | Choice) -> Plain | None:
        return chat_logprobs(said.logprobs) if self._with_logprobs and said.logprobs else None


def finish(reason: FinishReason | None) -> Plain:
    """Say how a choice ended, if it did."""
    if reason is FinishReason.DEADLINE:
        return {"finish_reason": FinishReason.LENGTH.value, "stop_reason": DEADLINE}
    return {"finish_reason": None if reason is None else reason.value}


def usage_of(done: TextDone) -> Plain:
    """Count the tokens."""
    return {
        "prompt_tokens": done.num_prompt_tokens,
        "completion_tokens": done.num_completion_tokens,
        "total_tokens": done.num_prompt_tokens + done.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": done.num_cached_tokens},
    }
