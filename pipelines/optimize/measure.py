"""Measures variants under serving conditions: each in its replica's engine, on the same users, interleaved.

Quality is measured on the lists that the engine returns, not on scores of a model outside of it. The lists depend on
the weights and the engine, so they are kept as a stage's output. Times are taken at each run: this process's CPU time,
which other programs on the machine affect little, with one request to each variant in turn. With one thread, this is
the time of a request on an idle core.

    ranked/<key>/gains.npy   each user's share of NDCG@10
"""

import hashlib
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch

import services.llm.engine
from models.registry.bundle import Bundle
from pipelines.data.examples import Cases, sample_cases
from pipelines.optimize import exports
from pipelines.runner.stage import Progress, StageCache, content_key
from services.llm.engine.config import EngineConfig, WeightKind
from services.llm.engine.engine import Engine
from services.llm.ranking.model import LoadedBundle, load_bundle

_K = 10
_NUM_TIMED, _NUM_BATCHES = 200, 20
_GAINS = "gains.npy"
_NUM_BATCHED = 32
"""Requests in flight for throughput, as many as an engine runs at once."""
_BLOCKS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Median CPU milliseconds of a single request, and prompt tokens per CPU second with 32 requests in flight."""

    request_ms: float
    tokens_per_s: float


class Ranker(Protocol):
    """What is measured."""

    @property
    def weight_bytes(self) -> int: ...

    def rank(self, histories: Sequence[np.ndarray]) -> tuple[list[np.ndarray], int]:
        """Return the list of each history, and the number of computed prompt tokens."""
        ...


class MeasuredVariant:
    """A bundle in its own engine, equal to its replica's except for a KV pool sized for the requests here."""

    def __init__(self, bundle: Bundle, dtype: torch.dtype, *, repeats: bool) -> None:
        """Load it with the weights that its manifest names. Raises as `load_bundle`."""
        config = EngineConfig(
            weight_kind=cast("WeightKind", bundle.weight_kind), num_blocks=_BLOCKS, max_running=_NUM_BATCHED
        )
        self._loaded: LoadedBundle = load_bundle(bundle, config, dtype, "cpu")
        self._repeats = repeats

    @property
    def weight_bytes(self) -> int:
        return self._loaded.engine.weight_bytes

    def rank(self, histories: Sequence[np.ndarray]) -> tuple[list[np.ndarray], int]:
        """Return the list of each history, all in flight at once, and the number of computed prompt tokens."""
        engine, catalogue = self._loaded.engine, self._loaded.catalogue
        for number, history in enumerate(histories):
            prompt = self._loaded.prompt.tokens(catalogue, history.tolist())
            engine.add_rank(str(number), prompt, k=_K, excluded=() if self._repeats else history)
        outcomes = _run(engine)
        tokens = sum(outcome.num_prompt_tokens - outcome.num_cached_tokens for outcome in outcomes.values())
        return [outcomes[str(number)].item_indices for number in range(len(histories))], tokens


def ranked(
    variant: Ranker, cases: Cases, cache: StageCache, about: Mapping[str, Any], progress: Progress
) -> np.ndarray:
    """Return each user's share of the NDCG@10 of a variant's lists.

    `about` identifies the inputs of the lists, in addition to the sources of the engine and the pipelines.
    """

    def work(out: Path) -> None:
        gains: list[float] = []
        for start in range(0, len(cases), _NUM_BATCHED):
            rows = slice(start, start + _NUM_BATCHED)
            lists, _ = variant.rank(cases.histories[rows])
            gains += [gain(ranking, int(target)) for ranking, target in zip(lists, cases.targets[rows], strict=True)]
            progress(len(gains), len(cases), "users")
        np.save(out / _GAINS, np.array(gains))

    key = content_key(dict(about), [_engine_sources(), str(len(cases))], [sys.modules[__name__], exports])
    ranked_gains: np.ndarray = np.load(cache.run("ranked", key, work).path / _GAINS)
    return ranked_gains


def speeds(variants: Mapping[str, Ranker], cases: Cases) -> dict[str, Speed]:
    """Time all variants in turns on some of these users. The first round is a warm-up."""
    alone, batches = sample_cases(cases, _NUM_TIMED), sample_cases(cases, _NUM_BATCHES * _NUM_BATCHED)
    times_ms = _timed(variants, [[history] for history in alone.histories])
    starts = range(0, len(batches), _NUM_BATCHED)
    per_token_ms = _timed(
        variants, [batches.histories[start : start + _NUM_BATCHED] for start in starts], per_token=True
    )
    return {
        name: Speed(
            request_ms=float(np.median(times_ms[name])), tokens_per_s=1e3 / float(np.median(per_token_ms[name]))
        )
        for name in variants
    }


def _timed(
    variants: Mapping[str, Ranker], rounds: Sequence[Sequence[np.ndarray]], *, per_token: bool = False
) -> dict[str, list[float]]:
    """Return, by variant, the milliseconds of each round after the first, or per computed prompt token in it."""
    spent_ms: dict[str, list[float]] = {name: [] for name in variants}
    for number, histories in enumerate(rounds):
        for name, variant in _rotated(variants, number):
            began_s = time.process_time()
            _, num_tokens = variant.rank(histories)
            spent_ms[name].append((time.process_time() - began_s) * 1e3 / (max(1, num_tokens) if per_token else 1))
    return {name: spent[1:] or spent for name, spent in spent_ms.items()}


def _engine_sources() -> str:
    """Return a hash of the engine's sources, for the key of kept lists."""
    folder, digest = Path(str(services.llm.engine.__file__)).parent, hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in {".py", ".cpp", ".h"}):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def gain(listed: np.ndarray, target: int) -> float:
    """Return a list's contribution to NDCG@10: 1 / log2(1 + rank of the label), 0 if the label is absent."""
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
