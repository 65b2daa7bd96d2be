"""One choice of a text while it is written: tokens in, pieces of text out.

Text is complete UTF-8: bytes that may be the beginning of a character wait for the rest, and what may be the beginning of
a stop string waits too. It knows neither the engine nor who listens.
"""

import codecs
from collections.abc import Collection
from dataclasses import replace

from services.contracts.text import FinishReason, TextPiece, TokenLogprob
from services.llm.engine.text.parameters import Chosen
from services.llm.text.stop_strings import StopStrings
from services.llm.text.tokenizer import TextTokenizer


class TextChoice:
    """Choice `index` of a request. Stop tokens end it and are not shown; `finish_reason` is None while it goes on."""

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
        self._text = ""
        self._logprobs: list[TokenLogprob] = []
        self._num_told = 0
        self._has_told_end = False

    def grow(self, chosen: Chosen) -> bool:
        """Go on by a token and tell whether that completed a stop string. What comes after the end is not taken in."""
        if self.finish_reason is not None:
            return False
        self.num_tokens += 1
        if chosen.token_id in self._stop_token_ids:
            return False
        if chosen.logprob is not None:
            self._logprobs.append(self._told(chosen))
        text = self._decoder.decode(self._tokenizer.shown_bytes(chosen.token_id))
        self._num_decoded += len(text)
        self._show(text)
        return self._stops.has_stopped

    def end(self, reason: FinishReason) -> None:
        """End the choice, unless a stop string has ended it already; what was kept back is shown."""
        if self.finish_reason is None:
            self._show(self._decoder.decode(b"", final=True))
        if self.finish_reason is None:
            self._text += self._stops.flush()
            self.finish_reason = reason

    def take_piece(self) -> TextPiece | None:
        """Return what is new since the last call; None where that is nothing that a caller would see."""
        is_last = self.finish_reason is not None and not self._has_told_end
        if not (self._text or self._logprobs or is_last):
            return None
        piece = TextPiece(
            index=self.index,
            text=self._text,
            num_tokens=self.num_tokens - self._num_told,
            logprobs=tuple(self._logprobs),
            finish_reason=self.finish_reason,
        )
        self._text, self._logprobs = "", []
        self._num_told, self._has_told_end = self.num_tokens, is_last
        return piece

    def _show(self, text: str) -> None:
        self._text += self._stops.feed(text)
        if self._stops.has_stopped:
            self.finish_reason = FinishReason.STOP

    def _told(self, chosen: Chosen) -> TokenLogprob:
        top = tuple(self._token(token_id, logprob) for token_id, logprob in chosen.top)
        own = self._token(chosen.token_id, chosen.logprob or 0.0)
        return replace(own, top=top, text_offset=self._num_decoded)

    def _token(self, token_id: int, logprob: float) -> TokenLogprob:
        token_bytes = self._tokenizer.bytes_of(token_id)
        return TokenLogprob(token=token_bytes.decode(errors="replace"), token_bytes=token_bytes, logprob=logprob)
