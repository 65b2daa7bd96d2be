"""Guided decoding: masks of the tokens that may come next in a text with a JSON schema, computed by llguidance.

A schema is compiled once and its state copied for each choice. White space is fixed to one space after commas and colons,
because a small model may otherwise generate white space without end.
"""

import json
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

from services.errors import InvalidRequest
from services.llm.text.tokenizer import TextTokenizer

_FIELD = "response_format"
_LAYOUT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_WORD_BITS = 32
_MAX_PROBLEM_LEN = 300


class JsonGuide:
    """Builds masks for one checkpoint's vocabulary of `vocab_size` tokens, ended by any of `eos_ids`."""

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._vocab_size = vocab_size
        self._tokenizer = LLTokenizer(
            tokenizer.as_json, n_vocab=vocab_size, eos_token=sorted(eos_ids), slices=LLTokenizer.json_slices()
        )

    def masks(self, schema: str, count: int) -> list["JsonMask"]:
        """Return a mask for each of `count` choices. Raises InvalidRequest with the problem of the schema."""
        matcher = self._matcher(schema)
        return [JsonMask(matcher.deep_copy(), self._vocab_size) for _ in range(count)]

    def _matcher(self, schema: str) -> LLMatcher:
        try:
            if not isinstance(json.loads(schema), dict):
                raise _bad_schema("a JSON schema is an object")
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides=_LAYOUT)
        except ValueError as error:
            raise _bad_schema(str(error)) from error
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise _bad_schema(matcher.get_error())
        return matcher


class JsonMask:
    """The `TokenMask` of one text. `failure` is the error of llguidance, if it had one."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._bits = np.zeros((1, -(-vocab_size // _WORD_BITS)), dtype=np.int32)
        self.failure: str | None = None

    def allowed(self) -> np.ndarray:
        """Return the bits of the tokens that the schema allows; of all tokens once llguidance has failed."""
        if self.failure is None:
            fill_next_token_bitmask(self._matcher, self._bits)
            self._note_failure()
        if self.failure is not None:
            self._bits.fill(-1)
        bits: np.ndarray = self._bits[0]
        return bits

    def take(self, token_id: int) -> None:
        """Advance by a token."""
        if self.failure is None:
            self._matcher.consume_token(token_id)
            self._note_failure()

    def _note_failure(self) -> None:
        if self._matcher.is_error():
            self.failure = self._matcher.get_error()


def _bad_schema(problem: str) -> InvalidRequest:
    message = " ".join(problem.split())[:_MAX_PROBLEM_LEN] or "not a schema"
    return InvalidRequest(_FIELD, message, "send a JSON schema")
