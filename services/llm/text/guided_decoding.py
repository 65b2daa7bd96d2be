"""Guided decoding: masks of the tokens that may come next in a text with a JSON schema, computed by llguidance.

A schema is compiled once and its state copied for each choice. White space is fixed to one space after commas and colons,
because a small model may otherwise generate white space without end.
"""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

from services.errors import InvalidRequest
from services.llm.text.tokenizer import TextTokenizer

_FIELD = "response_format"
_LAYOUT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_LIMITS = LLParserLimits(
    max_grammar_size=10_000, initial_lexer_fuel=200_000, max_lexer_states=20_000, verbose_errors=False
)
"""Lower than llguidance's defaults, under which the mask of one step took more than a second and held up every text of the engine."""
_WORD_BITS = 32
_MAX_PROBLEM_LEN = 300


class JsonGuide:
    """Builds masks for one checkpoint's vocabulary of `vocab_size` tokens, ended by any of `eos_ids`."""

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._vocab_size = vocab_size
        self._tokenizer = LLTokenizer(
            tokenizer.as_json, n_vocab=vocab_size, eos_token=sorted(eos_ids), slices=LLTokenizer.json_slices()
        )

    def compile(self, schema: str) -> "JsonGrammar":
        """Compile a schema with its first mask, which may take seconds of one core. Raises InvalidRequest with the problem of the schema."""
        try:
            if not isinstance(json.loads(schema), dict):
                raise _bad_schema("a JSON schema is an object")
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides=_LAYOUT)
        except ValueError as error:
            raise _bad_schema(str(error)) from error
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            fill_next_token_bitmask(matcher, _blank_bits(self._vocab_size))
        if matcher.is_error():
            raise _bad_schema(matcher.get_error())
        return JsonGrammar(matcher, self._vocab_size)


@dataclass(frozen=True, slots=True)
class JsonGrammar:
    """A compiled schema."""

    matcher: LLMatcher
    vocab_size: int

    def masks(self, count: int) -> list["JsonMask"]:
        """Return a mask for each of `count` choices."""
        return [JsonMask(self.matcher.deep_copy(), self.vocab_size) for _ in range(count)]


class JsonMask:
    """The `TokenMask` of one text. `failure` is the error of llguidance, if it had one."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._bits = _blank_bits(vocab_size)
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


def _blank_bits(vocab_size: int) -> np.ndarray:
    return np.zeros((1, -(-vocab_size // _WORD_BITS)), dtype=np.int32)


def _bad_schema(problem: str) -> InvalidRequest:
    """Return the error for a problem of llguidance's."""
    message = " ".join(problem.partition("<backtrace>")[0].split())[:_MAX_PROBLEM_LEN] or "not a schema"
    return InvalidRequest(_FIELD, message, "send a JSON schema, or a simpler one")
