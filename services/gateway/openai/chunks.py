"""The JSON of answers: chunks of a stream and whole answers, for completions and for chat. Pure.

A choice that ended at its deadline has the finish reason `length`, the nearest in OpenAI's API, and the stop reason
`deadline` (a vLLM field).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from services.contracts.text import FinishReason, TextDone, TextPiece, TokenLogprob

Json = dict[str, Any]

DEADLINE = "deadline"
_NEVER = -9_999.0


@dataclass(slots=True)
class Choice:
    """One choice, generated up to now."""

    text: str = ""
    num_tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def append(self, piece: TextPiece) -> None:
        """Append the next piece."""
        self.text += piece.text
        self.num_tokens += piece.num_tokens
        self.logprobs.extend(piece.logprobs)
        self.finish_reason = piece.finish_reason


class AnswerFormat(Protocol):
    """The JSON of one route's answers."""

    def opening(self, num_choices: int) -> Iterator[Json]:
        """Yield the chunks before any text."""
        ...

    def chunk(self, piece: TextPiece) -> Json: ...

    def whole(self, choices: list[Choice], usage: Json) -> Json: ...

    def usage_chunk(self, usage: Json) -> Json:
        """Return the last chunk, which has no choice."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """The fields that every chunk of an answer has. `num_logprobs` is as requested; None: no logprobs."""

    request_id: str
    created_unix_s: int
    model: str
    num_logprobs: int | None

    def fields(self, prefix: str, kind: str) -> Json:
        """Return the fields before `choices`."""
        return {
            "id": f"{prefix}-{self.request_id}",
            "object": kind,
            "created": self.created_unix_s,
            "model": self.model,
            "system_fingerprint": None,
        }


class CompletionFormat:
    """Answers of /v1/completions. `echoes` are the prompts to repeat before the text, by choice."""

    def __init__(self, head: AnswerHead, echoes: dict[int, str]) -> None:
        self._num_logprobs = head.num_logprobs
        self._head = head.fields("cmpl", "text_completion")
        self._echoes = echoes

    def opening(self, num_choices: int) -> Iterator[Json]:
        """Yield the prompts, if they are to be echoed."""
        for index in range(num_choices):
            if echo := self._echoes.get(index):
                yield self.chunk(TextPiece(index=index, text=echo, num_tokens=0))

    def chunk(self, piece: TextPiece) -> Json:
        return {**self._head, "choices": [self._choice(piece.index, piece.text, piece)]}

    def whole(self, choices: list[Choice], usage: Json) -> Json:
        """Return the whole answer; see AnswerFormat."""
        listed = [self._choice(i, self._echoes.get(i, "") + choice.text, choice) for i, choice in enumerate(choices)]
        return {**self._head, "choices": listed, "usage": usage}

    def usage_chunk(self, usage: Json) -> Json:
        return {**self._head, "choices": [], "usage": usage}

    def _choice(self, index: int, text: str, content: TextPiece | Choice) -> Json:
        num_top = self._num_logprobs
        logprobs = None if num_top is None else completion_logprobs(content.logprobs, num_top)
        return {"index": index, "text": text, "logprobs": logprobs, **_finish(content.finish_reason)}


class ChatFormat:
    """Answers of /v1/chat/completions."""

    def __init__(self, head: AnswerHead) -> None:
        self._has_logprobs = head.num_logprobs is not None
        self._whole_head = head.fields("chatcmpl", "chat.completion")
        self._chunk_head = head.fields("chatcmpl", "chat.completion.chunk")

    def opening(self, num_choices: int) -> Iterator[Json]:
        for index in range(num_choices):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            yield {**self._chunk_head, "choices": [choice]}

    def chunk(self, piece: TextPiece) -> Json:
        """Return the chunk for one piece; see AnswerFormat."""
        delta = {"content": piece.text} if piece.text else {}
        choice = {
            "index": piece.index,
            "delta": delta,
            "logprobs": self._logprobs(piece),
            **_finish(piece.finish_reason),
        }
        return {**self._chunk_head, "choices": [choice]}

    def whole(self, choices: list[Choice], usage: Json) -> Json:
        """Return the whole answer; see AnswerFormat."""
        listed = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self._logprobs(choice),
                **_finish(choice.finish_reason),
            }
            for index, choice in enumerate(choices)
        ]
        return {**self._whole_head, "choices": listed, "usage": usage}

    def usage_chunk(self, usage: Json) -> Json:
        return {**self._chunk_head, "choices": [], "usage": usage}

    def _logprobs(self, content: TextPiece | Choice) -> Json | None:
        return _chat_logprobs(content.logprobs) if self._has_logprobs and content.logprobs else None


def usage_of(done: TextDone) -> Json:
    """Return OpenAI's `usage`."""
    return {
        "prompt_tokens": done.num_prompt_tokens,
        "completion_tokens": done.num_completion_tokens,
        "total_tokens": done.num_prompt_tokens + done.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": done.num_cached_tokens},
    }


def completion_logprobs(tokens: Sequence[TokenLogprob], num_top: int) -> Json:
    """Return the completions form: parallel lists.

    The chosen token is always among the top tokens, as an extra if necessary.
    """
    return {
        "tokens": [token.token for token in tokens],
        "token_logprobs": [_in_json(token.logprob) for token in tokens],
        "top_logprobs": [_top_by_text(token) for token in tokens] if num_top else None,
        "text_offset": [token.text_offset for token in tokens],
    }


def _chat_logprobs(tokens: Sequence[TokenLogprob]) -> Json:
    """Return the chat form: a list of objects."""
    content = [{**_token(token), "top_logprobs": [_token(top) for top in token.top]} for token in tokens]
    return {"content": content, "refusal": None}


def _top_by_text(token: TokenLogprob) -> dict[str, float]:
    """Return the logprobs at a token's position.

    If tokens have equal text (parts of characters), the chosen or best one counts.
    """
    by_text: dict[str, float] = {}
    for top in token.top:
        by_text.setdefault(top.token, _in_json(top.logprob))
    return by_text | {token.token: _in_json(token.logprob)}


def _token(token: TokenLogprob) -> Json:
    return {"token": token.token, "logprob": _in_json(token.logprob), "bytes": list(token.token_bytes)}


def _in_json(logprob: float) -> float:
    """Return a log-probability; minus infinity, which JSON lacks, becomes OpenAI's substitute."""
    return _NEVER if logprob == -math.inf else logprob


def _finish(reason: FinishReason | None) -> Json:
    if reason is FinishReason.DEADLINE:
        return {"finish_reason": FinishReason.LENGTH.value, "stop_reason": DEADLINE}
    return {"finish_reason": None if reason is None else reason.value}
