"""What another OpenAI-compatible server says, in the contract's words: the chunks of a stream. Pure.

A chunk counts as one token unless its logprobs say otherwise; the server's own usage has the last word.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pydantic_core

from services.contracts.text import FinishReason, TextBegan, TextDone, TextEvent, TextPiece, TextRequest, TokenLogprob
from services.gateway.openai.answers import DEADLINE
from services.gateway.openai.remote_refusals import away, refusal_in
from services.gateway.text.count import NOTHING, counted

_GIVEN_UP = frozenset({"abort", "error"})
"""Finish reasons by which servers say that they broke off."""


class Reading:
    """One stream, read chunk by chunk."""

    def __init__(self, request: TextRequest) -> None:
        self._is_chat = bool(request.messages)
        self._choices = range(request.n)
        self._open = set(self._choices)
        self._has_begun = False
        self._counted = NOTHING
        self._told: TextDone | None = None
        self._num_characters: Counter[int] = Counter()

    def events_of(self, data: bytes) -> Iterator[TextEvent]:
        """Return the pieces of one chunk, and before all of them that the text began: an error may be the first chunk.

        Raises what an error event says, and for nonsense what reading nonsense raises.
        """
        chunk = pydantic_core.from_json(data)
        if error := chunk.get("error"):
            raise refusal_in(error)
        if not self._has_begun:
            self._has_begun = True
            yield TextBegan(num_prompt_tokens=0)
        if usage := chunk.get("usage"):
            self._told = _usage(usage)
        for choice in chunk["choices"]:
            piece = self._piece(choice)
            if piece.text or piece.num_tokens or piece.finish_reason is not None:
                self._counted = counted(self._counted, piece)
                if piece.finish_reason is not None:
                    self._open.discard(piece.index)
                yield piece

    def done(self) -> TextDone:
        """Return the end. Raises DependencyAway when the server ended before every choice did."""
        if self._open:
            raise away("it ended before every choice did")
        return self._told or self._counted

    def _piece(self, choice: Mapping[str, Any]) -> TextPiece:
        text = (choice["delta"].get("content") if self._is_chat else choice["text"]) or ""
        index = self._choices[choice["index"]]
        logprobs = tuple(_placed(_logprobs(choice.get("logprobs") or {}), self._num_characters[index]))
        self._num_characters[index] += len(text)
        return TextPiece(
            index=index,
            text=text,
            num_tokens=len(logprobs) or bool(text),
            logprobs=logprobs,
            finish_reason=_finish_reason(choice),
        )


def _usage(usage: Mapping[str, Any]) -> TextDone:
    details = usage.get("prompt_tokens_details") or {}
    return TextDone(
        num_prompt_tokens=usage.get("prompt_tokens") or 0,
        num_cached_tokens=details.get("cached_tokens") or 0,
        num_completion_tokens=usage.get("completion_tokens") or 0,
    )


def _finish_reason(choice: Mapping[str, Any]) -> FinishReason | None:
    reason = choice.get("finish_reason")
    if reason is None:
        return None
    if reason in _GIVEN_UP:
        raise away(f"it gave up: {reason}")
    if choice.get("stop_reason") == DEADLINE:
        return FinishReason.DEADLINE
    return FinishReason.LENGTH if reason == "length" else FinishReason.STOP


def _placed(tokens: Iterable[TokenLogprob], offset: int) -> Iterator[TokenLogprob]:
    """Say where tokens stand in the text: one after another, from here on."""
    for token in tokens:
        yield replace(token, text_offset=offset)
        offset += len(token.token)


def _logprobs(told: Mapping[str, Any]) -> Iterator[TokenLogprob]:
    """Read either form."""
    for one in told.get("content") or ():
        yield _token(one, tuple(_token(top, ()) for top in one.get("top_logprobs") or ()))
    tokens, values = told.get("tokens") or (), told.get("token_logprobs") or ()
    tops = told.get("top_logprobs") or [None] * len(tokens)
    for token, value, top in zip(tokens, values, tops, strict=True):
        ranked = tuple(_named(text, logprob) for text, logprob in (top or {}).items())
        yield TokenLogprob(token=token, token_bytes=token.encode(), logprob=value, top=ranked)


def _token(one: Mapping[str, Any], top: tuple[TokenLogprob, ...]) -> TokenLogprob:
    text, known = one["token"], one.get("bytes")
    token_bytes = bytes(known) if known is not None else text.encode()
    return TokenLogprob(token=text, token_bytes=token_bytes, logprob=one["logprob"], top=top)


def _named(text: str, logprob: float) -> TokenLogprob:
    return TokenLogprob(token=text, token_bytes=text.encode(), logprob=logprob)
