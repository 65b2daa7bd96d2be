"""Adds the scores of several sources of items, with weights by history length. Numpy only; no torch.

A source is a table of related items (models/similar.py), read at the newest items of a history: the items of a row
count by their score, by the source's weight, and by `decay` for each step back from the newest item. The sum is sparse:
it names at most `newest * N` items a source.

A model is one more source: its score of an item is the item's probability. The mixed score is the logarithm of the
weighted sum, so that a factor of a rule has the same effect on it as on a model's own score.

    <bundle>/sources/<name>/    a table; the source `similar` reads the bundle's table of similar items instead

The manifest's `mixer` lists the sources and, by model and history length, the weights that validation chose. A model
without a row of its own serves its own scores. `new_items` holds the factors that validation chose for items without
events: no training label was such an item, so a model's probabilities for them are too low.

Shape suffixes: V items, N neighbours of an item, L items of a history, R items named by all sources together.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from models.similar import NONE, SimilarTable

SOURCES = "sources"
STUDENT, DECODER = "student", "decoder"
MODEL = "model"
"""The weight of the model's own probability."""
NUM_NORMALISED = 100
"""Of a model that scores only some items of a large catalogue, the best ones whose probabilities sum to 1."""


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A table, and how a history reads it: at its `newest` items, each step back counting `decay` times as much."""

    table: SimilarTable
    newest: int = 5
    decay: float = 0.5

    def read(self, history: Sequence[int] | np.ndarray, weight: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
        """Return items (R,) and their scores (R,) float32; an item may occur several times, -1 never."""
        newest_L = np.array(history[-self.newest :], dtype=np.int64)[::-1]
        factors_L = weight * self.decay ** np.arange(len(newest_L), dtype=np.float32)
        items_R = self.table.neighbours_VN.take(newest_L, axis=0).ravel()
        scores_R = (self.table.scores_VN.take(newest_L, axis=0) * factors_L[:, None]).ravel()
        if items_R.min(initial=0) >= 0:
            return items_R, scores_R
        kept = items_R != NONE
        return items_R[kept], scores_R[kept]


def summed(items: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each item once, ascending, and the sum of its scores."""
    unique, owner = np.unique(items, return_inverse=True)
    return unique, np.bincount(owner, scores, minlength=len(unique))


@dataclass(frozen=True, slots=True)
class Blend:
    """Weights for histories of `first` to `last` known items (None: no upper end), by source; `MODEL` for the model."""

    first: int
    last: int | None
    weights: Mapping[str, float]

    @property
    def model_weight(self) -> float:
        """The weight of the model's probability; 0 if the model adds nothing."""
        return float(self.weights.get(MODEL, 0.0))


@dataclass(frozen=True, slots=True, eq=False)
class NewItems:
    """The items without events, and the factors of their scores by the model and by the sources."""

    is_new_V: np.ndarray
    model: float
    sources: float

    def scale(self, items: np.ndarray, scores: np.ndarray, factor: float) -> np.ndarray:
        """Return the scores of these items, those of new items times a factor."""
        scaled: np.ndarray = np.where(self.is_new_V[items], scores * np.float32(factor), scores)
        return scaled


@dataclass(frozen=True, slots=True, eq=False)
class Added:
    """The sources' part of a mixed score: items (R,), with duplicates, and their scores (R,).

    `model_weight` is the weight of the model's probabilities, 0 if the sources rank without it. `new` are the new
    items, if their scores have factors.
    """

    items: np.ndarray
    scores: np.ndarray
    model_weight: float
    new: NewItems | None = None

    def best(self, logits: np.ndarray, allowed: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return at most `k` allowed items by the mix with a model's logits of all items, and their scores.

        `logits` and `allowed` are (V,).
        """
        sums: np.ndarray = np.bincount(self.items, self.scores, minlength=len(logits))
        if self.model_weight:
            own = np.float32(self.model_weight) * softmax(logits)
            if self.new is not None:
                own[self.new.is_new_V] *= np.float32(self.new.model)
            sums = sums + own
        return best_of(np.arange(len(logits)), sums * allowed, k)

    def best_ranked(
        self, ranked: np.ndarray, logs: np.ndarray, allowed: np.ndarray, k: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return at most `k` allowed items by the mix with the items (n,) that a model ranked, and their scores.

        `logs` (n,) are their log-probabilities; the model gives other items no probability.
        """
        own = self.model_weight * np.exp(logs)
        if self.new is not None:
            own = self.new.scale(ranked, own, self.new.model)
        items, sums = summed(np.concatenate([ranked, self.items]), np.concatenate([own, self.scores]))
        kept = allowed[items]
        return best_of(items[kept], sums[kept], k)


@dataclass(frozen=True, slots=True, eq=False)
class Mixer:
    """The sources of one bundle, and by model the blends and the new items. Thread-safe for reading."""

    sources: Mapping[str, Source]
    blends: Mapping[str, Sequence[Blend]]
    new_items: Mapping[str, NewItems] = field(default_factory=dict)

    def blend(self, model: str, num_history: int) -> Blend | None:
        """Return the weights for this model and history length; None if the model's own scores serve."""
        for blend in self.blends.get(model, ()):
            if blend.first <= num_history and (blend.last is None or num_history <= blend.last):
                return blend if blend.weights.keys() - {MODEL} else None
        return None

    def added(self, model: str, history: Sequence[int] | np.ndarray) -> Added | None:
        """Return the scores that the sources add to this model's; None if the model serves without them."""
        blend = self.blend(model, len(history))
        return None if blend is None else self.read(history, blend, self.new_items.get(model))

    def read(self, history: Sequence[int] | np.ndarray, blend: Blend, new: NewItems | None = None) -> Added:
        """Return the weighted scores of all sources of a blend."""
        read = [part for _, part in self._parts(history, blend, new)]
        items, scores = (np.concatenate([part[which] for part in read]) for which in (0, 1))
        return Added(items, scores, blend.model_weight, new)

    def contributions(
        self, model: str, history: Sequence[int], blend: Blend, items: Sequence[int]
    ) -> list[dict[str, float]]:
        """Return the weighted score of each source for each of these items, without the model's part."""
        by_item: list[dict[str, float]] = [{} for _ in items]
        for name, (named, scores) in self._parts(history, blend, self.new_items.get(model)):
            for own, item in zip(by_item, items, strict=True):
                if (of_item := named == item).any():
                    own[name] = float(scores[of_item].sum())
        return by_item

    def _parts(
        self, history: Sequence[int] | np.ndarray, blend: Blend, new: NewItems | None
    ) -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray]]]:
        for name, weight in blend.weights.items():
            if name != MODEL:
                items, scores = self.sources[name].read(history, weight)
                yield name, (items, scores if new is None else new.scale(items, scores, new.sources))


def best_of(items: np.ndarray, scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return at most `k` of these items with a score above 0, best first (ties by index), and the logarithms."""
    kept = np.flatnonzero((scores >= floor_of(scores, k)) & (scores > 0))
    best, best_scores = items[kept], scores[kept]
    order = np.lexsort((best, -best_scores))[:k]
    return best[order], np.log(best_scores[order])


_BLOCK, _LEAST_BLOCK = 1_024, 128
"""Items per block, with at least four blocks for each requested item.

Maxima of smaller blocks cost more than one partition.
"""


def floor_of(scores_V: np.ndarray, k: int) -> float:
    """Return a score that at least `k` items reach, and few more; all are reached where there are no more.

    The k-th best score is such a bound. So is the k-th best of the maxima of equal blocks, which costs one pass over
    the scores instead of a partition. All items at or above the bound are candidates, so ties at the bound are decided
    by index.
    """
    if not 0 < k < len(scores_V):
        return -np.inf
    block = min(_BLOCK, len(scores_V) // (4 * k))
    if block < _LEAST_BLOCK:
        return float(np.partition(scores_V, len(scores_V) - k)[len(scores_V) - k])
    whole = len(scores_V) // block * block
    maxima = scores_V[:whole].reshape(-1, block).max(axis=1)
    return float(np.partition(maxima, len(maxima) - k)[len(maxima) - k])


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return the probabilities of these logits (..., V), float32."""
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probabilities: np.ndarray = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return probabilities


def blend_of(row: Mapping[str, Any]) -> Blend:
    """Read a blend from its row in a manifest."""
    first, last = row["history"]
    return Blend(first, last, row["weights"])


def mixer_of(
    manifest: Mapping[str, Any], tables: Mapping[str, SimilarTable], popularity: np.ndarray | None = None
) -> Mixer | None:
    """Return the mixer that a manifest describes, with the tables of its sources by name; None without one.

    `popularity` (V,) counts the events of each item; None: no item is new.
    """
    about = manifest.get("mixer")
    if about is None:
        return None
    sources = {
        name: Source(tables[name], reading["newest"], reading["decay"]) for name, reading in about["sources"].items()
    }
    blends = {model: tuple(blend_of(row) for row in rows) for model, rows in about["blends"].items()}
    return Mixer(sources, blends, {} if popularity is None else _new_items(about.get("new_items", {}), popularity))


def _new_items(about: Mapping[str, Any], popularity: np.ndarray) -> dict[str, NewItems]:
    """Return the new items by model. Beyond the number of items in validation, factors shrink in proportion."""
    is_new_V = popularity == 0
    num = int(is_new_V.sum())
    if not num:
        return {}
    new_items = {}
    for model, row in about.items():
        share = min(1.0, row["num_items"] / num)
        new_items[model] = NewItems(is_new_V, *(1 + share * (row[name] - 1) for name in ("model", "sources")))
    return new_items
