"""How a request ended. Every request that was added gets exactly one outcome."""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np


class Status(StrEnum):
    """Why a request ended. The values are the finish reasons in the metrics."""

    DONE = "stop"
    LENGTH = "length"
    LATE = "deadline"
    CANCELLED = "abort"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """The end of one request. `item_indices` (n,) int64 and `scores` (n,) float32, best first, are empty unless it was a finished ranking.

    Scores are natural log-probabilities. Times are on the clock that `add_*` and `step` were given; `started_s` is None
    for what never ran.
    """

    request_id: str
    status: Status
    item_indices: np.ndarray
    scores: np.ndarray
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    arrival_s: float
    started_s: float | None
