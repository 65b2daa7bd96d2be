"""Read the stream of another OpenAI-compatible server: server-sent events, then their chunks as TextEvents.

Lines of server-sent events end only with a line feed, a carriage return, or both: other Unicode line separators may
occur unescaped in JSON. A chunk counts as one token unless it has logprobs; the server's usage overrides.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import httpx
import pydantic_core

from services.contracts.access import ANYONE
from services.contracts.text import FinishReason, TextBegan, TextDone, TextEvent, TextPiece, TextRequest, TokenLogprob
from services.gateway.openai.chunks import DEADLINE
from services.gateway.openai.remote.errors import error_of_event, unavailable
from services.gateway.text.deadline import NOTHING, counted

_DATA, _DONE = b"data:", b"[DONE]"
_END_TIMEOUT_S = 0.5
"""How long a server may take to end its response after `[DONE]`, so that the connection can be reused."""
_ABORTED = frozenset({"abort", "error"})
"""Finish reasons of servers that aborted generation."""
_UNFINISHED = (None, "", "null")
"""Finish reasons of a choice that is not at its end; SGLang, Ollama and KoboldCpp have sent the texts."""


async def data_of(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the data of each event up to `[DONE]`. Raises DependencyUnavailable if the stream ends without it."""
    async for line in _lines_of(body):
        if line.startswith(_DATA):
            data = line[len(_DATA) :].strip()
            if data == _DONE:
                await _drain(body)
                return
            yield data
    raise unavailable("it broke off before the end")


async def _lines_of(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    partial = b""
    async for chunk in body:
        *lines, partial = [*(partial + chunk).splitlines(keepends=True), b""]
        if lines and not lines[-1].endswith((b"\n", b"\r")):
            partial = lines.pop()
        for line in lines:
            yield line
    yield partial


async def _drain(body: AsyncIterator[bytes]) -> None:
    """Read to the response's end, so that the connection can be reused. Failures are ignored."""
    with suppress(TimeoutError, httpx.HTTPError, httpx.StreamError):
        async with asyncio.timeout(_END_TIMEOUT_S):
            async for _ in body:
                pass


class ChunkReader:
    """Turns the chunks of one stream into TextEvents."""

    def __init__(self, request: TextRequest) -> None:
        self._is_chat = bool(request.messages)
        self._has_keys = request.key_id != ANYONE.key_id
        self._choices = range(request.n)
        self._open = set(self._choices)
        self._has_begun = False
        self._counted = NOTHING
        self._usage: TextDone | None = None
        self._num_characters: Counter[int] = Counter()

    def events_of(self, data: bytes) -> Iterator[TextEvent]:
        """Yield the events of one chunk; TextBegan comes with the first chunk that is not an error.

        Raises the error of an error event, and any parsing error for malformed chunks.
        """
        chunk = pydantic_core.from_json(data)
        if error := chunk.get("error"):
            raise error_of_event(error)
        if usage := chunk.get("usage"):
            self._usage = _usage(usage, self._has_keys)
        if not self._has_begun:
            self._has_begun, so_far = True, self._usage or NOTHING
            yield TextBegan(num_prompt_tokens=so_far.num_prompt_tokens, num_cached_tokens=so_far.num_cached_tokens)
        for choice in chunk["choices"]:
            piece = self._piece(choice)
            if piece.text or piece.num_tokens or piece.finish_reason is not None:
                self._counted = counted(self._counted, piece)
                if piece.finish_reason is not None:
                    self._open.discard(piece.index)
                yield piece

    def done(self) -> TextDone:
        """Return the last event. Raises DependencyUnavailable if the stream ended before every choice did."""
        if self._open:
            raise unavailable("it ended before every choice did")
        return self._usage or self._counted

    def _piece(self, choice: Mapping[str, Any]) -> TextPiece:
        text = (choice["delta"].get("content") if self._is_chat else choice["text"]) or ""
        index = self._choices[choice["index"]]
        logprobs = tuple(_with_offsets(_logprobs(choice.get("logprobs") or {}), self._num_characters[index]))
        self._num_characters[index] += len(text)
        return TextPiece(
            index=index,
            text=text,
            num_tokens=len(logprobs) or bool(text),
            logprobs=logprobs,
            finish_reason=_finish_reason(choice),
        )


def _usage(usage: Mapping[str, Any], has_keys: bool) -> TextDone:
    """Return the tokens used.

    Cached tokens count only without keys: the server does not know our keys, so its cache hits could reveal another
    key's prompts.
    """
    details = {} if has_keys else usage.get("prompt_tokens_details") or {}
    return TextDone(
        num_prompt_tokens=usage.get("prompt_tokens") or 0,
        num_cached_tokens=details.get("cached_tokens") or 0,
        num_completion_tokens=usage.get("completion_tokens") or 0,
    )


def _finish_reason(choice: Mapping[str, Any]) -> FinishReason | None:
    reason = choice.get("finish_reason")
    if reason in _UNFINISHED:
        return None
    if reason in _ABORTED:
        raise unavailable(f"it gave up: {reason}")
    if choice.get("stop_reason") == DEADLINE:
        return FinishReason.DEADLINE
    return FinishReason.LENGTH if reason == "length" else FinishReason.STOP


def _with_offsets(tokens: Iterable[TokenLogprob], offset: int) -> Iterator[TokenLogprob]:
    """Set each token's offset in the text, starting at `offset`."""
    for token in tokens:
        yield replace(token, text_offset=offset)
        offset += len(token.token)


def _logprobs(logprobs: Mapping[str, Any]) -> Iterator[TokenLogprob]:
    """Read either form: the chat's list of objects, or the completions' parallel lists."""
    for entry in logprobs.get("content") or ():
        yield _token(entry, tuple(_token(top, ()) for top in entry.get("top_logprobs") or ()))
    tokens, values = logprobs.get("tokens") or (), logprobs.get("token_logprobs") or ()
    tops = logprobs.get("top_logprobs") or [None] * len(tokens)
    for token, value, top in zip(tokens, values, tops, strict=True):
        alternatives = tuple(_token_of(text, logprob) for text, logprob in (top or {}).items())
        yield replace(_token_of(token, value), top=alternatives)


def _token(entry: Mapping[str, Any], top: tuple[TokenLogprob, ...]) -> TokenLogprob:
    text, token_bytes = entry["token"], entry.get("bytes")
    return TokenLogprob(
        token=text,
        token_bytes=text.encode() if token_bytes is None else bytes(token_bytes),
        logprob=entry["logprob"],
        top=top,
    )


def _token_of(text: str, logprob: float) -> TokenLogprob:
    return TokenLogprob(token=text, token_bytes=text.encode(), logprob=logprob)
