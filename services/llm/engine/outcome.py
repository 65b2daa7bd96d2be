"""The end of a request. Every added request gets exactly one outcome."""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from services.llm.engine.sampling_parameters import SampledToken
from services.llm.engine.sequence import Sequence

_NO_ITEMS = np.zeros(0, dtype=np.int64)
_NO_SCORES = np.zeros(0, dtype=np.float32)


class SequenceStatus(StrEnum):
    """Reason for the end of a request. The values are the finish reasons in the metrics."""

    DONE = "stop"
    LENGTH = "length"
    LATE = "deadline"
    CANCELLED = "abort"
    FAILED = "error"


@dataclass(frozen=True, slots=True)
class NewToken:
    """A text request got a token; `num_cached_tokens` of its prompt came from the prefix cache."""

    request_id: str
    sampled: SampledToken
    num_cached_tokens: int
    arrival_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineOutcome:
    """The end of one request.

    `item_indices` (n,) int64 and `scores` (n,) float32, best first, are empty unless a ranking is done. Scores are
    natural log-probabilities. `tokens` are the generated tokens of a text. Times are on the clock of the caller's
    `now_s`; `started_s` is None for a request that never ran, `decoding_s` (when the prompt was computed) for a request
    that ended with its prompt.
    """

    request_id: str
    status: SequenceStatus
    item_indices: np.ndarray
    scores: np.ndarray
    tokens: tuple[SampledToken, ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    arrival_s: float
    started_s: float | None
    decoding_s: float | None = None
    num_steps: int = 0
    num_preemptions: int = 0

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The generated tokens, including a stop token."""
        return tuple(token.token_id for token in self.tokens)

    @classmethod
    def of(
        cls, sequence: Sequence, status: SequenceStatus, items: np.ndarray = _NO_ITEMS, scores: np.ndarray = _NO_SCORES
    ) -> "EngineOutcome":
        return cls(
            request_id=sequence.request_id,
            status=status,
            item_indices=items,
            scores=scores,
            tokens=tuple(sequence.generated),
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_cached_tokens=sequence.num_cached_tokens,
            arrival_s=sequence.arrival_s,
            started_s=sequence.started_s,
            decoding_s=sequence.decoding_s,
            num_steps=sequence.num_steps,
            num_preemptions=sequence.num_preemptions,
        )
