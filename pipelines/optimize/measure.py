"""Variants measured where they serve: each in the engine of its replica, on the same users, side by side.

The lists that the engine returns are judged, not scores of a model beside it. Times are taken in turns, a request to each variant after the other,
so that another program on the machine slows all of them alike.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch

from models.prompt import prompt_tokens
from models.registry import Bundle
from pipelines.data.examples import Cases, sample_cases
from pipelines.runner.stage import Progress
from services.llm.engine.config import EngineConfig, WeightKind
from services.llm.engine.engine import Engine
from services.llm.ranking.model import LoadedBundle, load_bundle

_K = 10
_NUM_TIMED = 200
_NUM_BATCHED = 32
"""Requests in flight where throughput is measured, as many as an engine runs at once."""
_BLOCKS = 512


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """What one variant did: each user's share of NDCG@10, milliseconds of a request alone, prompt tokens a second under load, bytes of its weights in memory."""

    gains: np.ndarray
    request_ms: float
    tokens_per_s: float
    weight_bytes: int

    @property
    def ndcg(self) -> float:
        """NDCG@10 of the served lists."""
        return float(self.gains.mean())


class Ranker(Protocol):
    """What is measured."""

    @property
    def weight_bytes(self) -> int:
        """The bytes of its weights, as they stay in memory."""
        ...

    def rank(self, histories: Sequence[np.ndarray]) -> tuple[list[np.ndarray], int]:
        """Return the list of each history, and how many prompt tokens were computed."""
        ...


class Variant:
    """A bundle in an engine of its own; the same as its replica's, with a KV pool that is large enough for its requests here."""

    def __init__(self, bundle: Bundle, dtype: torch.dtype, *, repeats: bool) -> None:
        """Load it with the weights that its manifest names. Raises what `load_bundle` raises."""
        config = EngineConfig(
            weight_kind=cast("WeightKind", bundle.weight_kind), num_blocks=_BLOCKS, max_running=_NUM_BATCHED
        )
        self._loaded: LoadedBundle = load_bundle(bundle, config, dtype, "cpu")
        self._repeats = repeats

    @property
    def weight_bytes(self) -> int:
        """The bytes of its weights."""
        return self._loaded.engine.weight_bytes

    def rank(self, histories: Sequence[np.ndarray]) -> tuple[list[np.ndarray], int]:
        """Return the list of each history, all in flight at once, and how many prompt tokens were computed."""
        engine, catalogue = self._loaded.engine, self._loaded.catalogue
        for number, history in enumerate(histories):
            prompt = prompt_tokens(catalogue, history.tolist(), self._loaded.max_items, self._loaded.stride)
            engine.add_rank(str(number), prompt, k=_K, excluded=() if self._repeats else history)
        outcomes = _run(engine)
        tokens = sum(one.num_prompt_tokens - one.num_cached_tokens for one in outcomes.values())
        return [outcomes[str(number)].item_indices for number in range(len(histories))], tokens


def measure(variants: Mapping[str, Ranker], cases: Cases, progress: Progress) -> dict[str, Measured]:
    """Measure all variants on these users, in turns. The first request of each is not timed."""
    alone = sample_cases(cases, _NUM_TIMED)
    times_ms: dict[str, list[float]] = {name: [] for name in variants}
    for number, history in enumerate(alone.histories):
        for name, variant in _rotated(variants, number):
            began = time.perf_counter()
            variant.rank([history])
            times_ms[name].append((time.perf_counter() - began) * 1e3)
    gains: dict[str, list[float]] = {name: [] for name in variants}
    spent_s, tokens = dict.fromkeys(variants, 0.0), dict.fromkeys(variants, 0)
    for start in range(0, len(cases), _NUM_BATCHED):
        rows = slice(start, start + _NUM_BATCHED)
        for name, variant in _rotated(variants, start // _NUM_BATCHED):
            began = time.perf_counter()
            lists, count = variant.rank(cases.histories[rows])
            spent_s[name] += time.perf_counter() - began
            tokens[name] += count
            gains[name] += [gain(found, int(target)) for found, target in zip(lists, cases.targets[rows], strict=True)]
        progress(min(start + _NUM_BATCHED, len(cases)), len(cases), "users")
    return {
        name: Measured(
            gains=np.array(gains[name]),
            request_ms=float(np.median(times_ms[name][1:] or times_ms[name])),
            tokens_per_s=tokens[name] / spent_s[name],
            weight_bytes=variant.weight_bytes,
        )
        for name, variant in variants.items()
    }


def gain(listed: np.ndarray, target: int) -> float:
    """Return what a list adds to NDCG@10: 1 / log2(1 + place of the label), 0 where it is not in the list."""
    (places,) = np.nonzero(listed[:_K] == target)
    return float(1 / np.log2(2 + places[0])) if len(places) else 0.0


def _rotated(variants: Mapping[str, Ranker], by: int) -> list[tuple[str, Ranker]]:
    listed = list(variants.items())
    by %= len(listed)
    return listed[by:] + listed[:by]


def _run(engine: Engine) -> dict[str, Any]:
    done = {}
    while engine.has_work:
        for outcome in engine.step(0.0):
            done[outcome.request_id] = outcome
    return done
