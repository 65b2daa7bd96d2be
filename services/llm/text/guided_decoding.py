"""Guided decoding: masks of the allowed next tokens of a text with a JSON schema, computed by llguidance.

A schema is compiled once and its state copied for each choice. White space is fixed to a single space after commas and
colons, because a small model may otherwise generate white space without end. The grammar is not trusted: a separate
validator checks each finished text.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NoReturn

import jsonschema_rs
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

from services.errors import InvalidRequest
from services.llm.text.schema_rules import FIELD, prepared, refusal
from services.llm.text.tokenizer import TextTokenizer

_LAYOUT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_LIMITS = LLParserLimits(
    max_grammar_size=10_000, initial_lexer_fuel=200_000, max_lexer_states=20_000, verbose_errors=False
)
"""Below llguidance's defaults: those took more than a second per step for the mask and delayed every text."""
_WORD_BITS = 32
_MAX_PROBLEM_LEN = 300
_PATTERNS = jsonschema_rs.RegexOptions(size_limit=2**20, dfa_size_limit=2**20)
"""Without backtracking, in linear time."""
_MAX_DIGITS = 4_000
"""Python rejects longer integers."""
_MAX_EXPONENT = 400
"""No schema with bounds allows larger numbers."""
_FIXES = {
    "oneOf constraints": (
        "oneOf: the alternatives may overlap",
        "send anyOf, or give each alternative a required constant of its own",
    ),
    "Unimplemented keys": ("", "remove it from the schema, and check it in the answer"),
    "Unknown format": ("", "send a pattern"),
    "Failed to generate regex": ("", "send bounds nearer to 0, or no bounds"),
    'is not a "regex"': ("", "send a pattern without look-around and back-references"),
}
"""llguidance's problems that need rewording for our callers: the problem (empty: unchanged) and the fix."""


class JsonGuide:
    """Builds masks for a checkpoint's vocabulary of `vocab_size` tokens; any of `eos_ids` ends a text."""

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._vocab_size = vocab_size
        self._tokenizer = LLTokenizer(
            tokenizer.as_json, n_vocab=vocab_size, eos_token=sorted(eos_ids), slices=LLTokenizer.json_slices()
        )

    def compile(self, schema: str) -> "JsonGrammar":
        """Compile a schema with its first mask, which may take seconds of one core.

        Raises InvalidRequest with the problem of the schema.
        """
        try:
            parsed = json.loads(schema)
            if not isinstance(parsed, dict):
                raise _bad_schema("a JSON schema is an object")
            validator = _validator_of(parsed)
            sound = json.dumps(prepared(parsed, _matcher_of))
            grammar = LLMatcher.grammar_from_json_schema(sound, overrides=_LAYOUT)
        except (ValueError, RecursionError, jsonschema_rs.ReferencingError) as error:
            raise _bad_schema(str(error)) from error
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            fill_next_token_bitmask(matcher, _blank_bits(self._vocab_size))
        if matcher.is_error():
            raise _bad_schema(matcher.get_error())
        return JsonGrammar(matcher, self._vocab_size, validator)


@dataclass(frozen=True, slots=True)
class JsonGrammar:
    """A compiled schema, and the validator of its texts."""

    matcher: LLMatcher
    vocab_size: int
    validator: jsonschema_rs.Validator

    def masks(self, count: int) -> list["JsonMask"]:
        return [JsonMask(self.matcher.deep_copy(), self.vocab_size, self.validator) for _ in range(count)]


class JsonMask:
    """The `TokenMask` of one text. `failure` is llguidance's error, if any; it ends the text."""

    def __init__(self, matcher: Any, vocab_size: int, validator: jsonschema_rs.Validator) -> None:
        self._matcher = matcher
        self._bits = _blank_bits(vocab_size)
        self._validator = validator
        self.failure: str | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the text has ended at a position where the grammar may end."""
        return self.failure is None and bool(self._matcher.is_stopped())

    def violation_of(self, text: str) -> str | None:
        """Return the violation of the schema by a complete text, or None."""
        try:
            value = json.loads(text, parse_int=_integer, parse_float=_real)
        except (ValueError, RecursionError) as error:
            return f"not JSON ({error})"
        violation = next(self._validator.iter_errors(value), None)
        if violation is None:
            return None
        return f"/{'/'.join(map(str, violation.instance_path))}: {violation.message}"[:_MAX_PROBLEM_LEN]

    def allowed(self) -> np.ndarray:
        """Return the bits of the allowed tokens; all tokens after llguidance has failed."""
        if self.failure is None:
            fill_next_token_bitmask(self._matcher, self._bits)
            self._note_failure()
        if self.failure is not None:
            self._bits.fill(-1)
        bits: np.ndarray = self._bits[0]
        return bits

    def take(self, token_id: int) -> None:
        if self.failure is None:
            self._matcher.consume_token(token_id)
            self._note_failure()

    def fork(self) -> "JsonMask":
        """Return an independent mask at the same position."""
        fork = JsonMask(self._matcher.deep_copy(), 32 * self._bits.shape[-1], self._validator)
        fork.failure = self.failure
        return fork

    def _note_failure(self) -> None:
        if self._matcher.is_error():
            self.failure = self._matcher.get_error()


def _blank_bits(vocab_size: int) -> np.ndarray:
    return np.zeros((1, -(-vocab_size // _WORD_BITS)), dtype=np.int32)


def _validator_of(schema: dict[str, Any]) -> jsonschema_rs.Validator:
    """Return the schema's validator, which fetches nothing. Raises ValueError with the problem of the schema."""
    return jsonschema_rs.validator_for(schema, validate_formats=True, pattern_options=_PATTERNS, retriever=_retrieve)


def _retrieve(uri: str) -> NoReturn:
    raise ValueError(f"{uri}: only references within the schema are followed")


def _matcher_of(pattern: str) -> Callable[[str], bool]:
    return _validator_of({"pattern": pattern}).is_valid


def _integer(digits: str) -> int | Decimal:
    return int(digits) if len(digits) <= _MAX_DIGITS else Decimal(digits)


def _real(digits: str) -> Decimal | float:
    """Return a real number exactly, if validators can compute with its exponent."""
    mantissa, _, exponent = digits.lower().partition("e")
    is_plain = len(exponent) < _MAX_DIGITS and abs(int(exponent or "0")) <= _MAX_EXPONENT
    return Decimal(digits) if is_plain else float(mantissa)


def _bad_schema(problem: str) -> InvalidRequest:
    """Return the error for a problem of llguidance or of the validator."""
    message = " ".join(problem.partition("<backtrace>")[0].partition("\n\n")[0].split())[:_MAX_PROBLEM_LEN]
    for words, (own, fix) in _FIXES.items():
        if words in message:
            return refusal("", own or message, fix)
    return InvalidRequest(FIELD, message or "not a schema", "send a JSON schema, or a simpler one")
