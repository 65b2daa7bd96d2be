"""Adds the scores of several sources of items, with weights by history length. Numpy only; no torch.

A source is a table of related items (models/similar.py), read at the newest items of a history: the items of a row
count by their score, by the source's weight, and by `decay` for each step back from the newest item. The sum is sparse:
it names at most `newest * N` items a source.

A model is one more source: its score of an item is the item's probability. The mixed score is the logarithm of the
weighted sum, so that a factor of a rule has the same effect on it as on a model's own score.

    <bundle>/sources/<name>/    a table; the source `similar` reads the bundle's table of similar items instead

The manifest's `mixer` lists the sources and, by model and history length, the weights that validation chose. A model
without a row of its own serves its own scores.

Shape suffixes: V items, N neighbours of an item, L items of a history, R items named by all sources together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from models.similar import NONE, SimilarTable

SOURCES = "sources"
STUDENT, DECODER = "student", "decoder"
MODEL = "model"
"""The weight of the model's own probability."""


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A table, and how a history reads it: at its `newest` items, each step back counting `decay` times as much."""

    table: SimilarTable
    newest: int = 5
    decay: float = 0.5

    def read(self, history: Sequence[int], weight: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
        """Return items (R,) and their scores (R,) float64; an item may occur several times, -1 never."""
        newest_L = np.asarray(history[-self.newest :], dtype=np.int64)[::-1]
        factors_L = weight * self.decay ** np.arange(len(newest_L))
        items_R = self.table.neighbours_VN[newest_L].ravel()
        scores_R = (self.table.scores_VN[newest_L] * factors_L[:, None]).ravel()
        kept = items_R != NONE
        return items_R[kept], scores_R[kept]


NUM_NORMALISED = 100
"""Of a model that scores only some items of a large catalogue, the best ones whose probabilities sum to 1."""


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
class Added:
    """The sources' part of a mixed score: items (R,), of which one may occur several times, and their scores (R,).

    `model_weight` is the weight of the model's probabilities, 0 if the sources rank without it.
    """

    items: np.ndarray
    scores: np.ndarray
    model_weight: float

    def best(self, logits: np.ndarray, allowed: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return at most `k` allowed items by the mix with a model's logits of all items, and their scores.

        `logits` and `allowed` are (V,).
        """
        sums = np.bincount(self.items, self.scores, minlength=len(logits))
        if self.model_weight:
            sums = sums + self.model_weight * softmax(logits)
        return best_of(np.flatnonzero(allowed), sums[allowed], k)

    def best_ranked(
        self, ranked: np.ndarray, logs: np.ndarray, allowed: np.ndarray, k: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return at most `k` allowed items by the mix with the items (n,) that a model ranked, and their scores.

        `logs` (n,) are their log-probabilities; the model gives other items no probability.
        """
        items, sums = summed(
            np.concatenate([ranked, self.items]),
            np.concatenate([self.model_weight * np.exp(logs), self.scores]),
        )
        kept = allowed[items]
        return best_of(items[kept], sums[kept], k)


@dataclass(frozen=True, slots=True, eq=False)
class Mixer:
    """The sources of one bundle, and the blends of each of its models. Thread-safe for reading."""

    sources: Mapping[str, Source]
    blends: Mapping[str, Sequence[Blend]]

    def blend(self, model: str, num_history: int) -> Blend | None:
        """Return the weights for this model and history length; None if the model's own scores serve."""
        for blend in self.blends.get(model, ()):
            if blend.first <= num_history and (blend.last is None or num_history <= blend.last):
                return blend if blend.weights.keys() - {MODEL} else None
        return None

    def added(self, model: str, history: Sequence[int]) -> Added | None:
        """Return the scores that the sources add to this model's for a history; None if the model serves without them."""
        blend = self.blend(model, len(history))
        return None if blend is None else self.read(history, blend)

    def read(self, history: Sequence[int], blend: Blend) -> Added:
        """Return the weighted scores of all sources of a blend."""
        read = [self.sources[name].read(history, weight) for name, weight in blend.weights.items() if name != MODEL]
        items, scores = (np.concatenate([part[which] for part in read]) for which in (0, 1))
        return Added(items, scores, blend.model_weight)

    def contributions(self, history: Sequence[int], blend: Blend, items: Sequence[int]) -> list[dict[str, float]]:
        """Return the weighted score of each source for each of these items, without the model's part."""
        found: list[dict[str, float]] = [{} for _ in items]
        for name, weight in blend.weights.items():
            if name != MODEL:
                named, scores = self.sources[name].read(history, weight)
                for own, item in zip(found, items, strict=True):
                    if (of_item := named == item).any():
                        own[name] = float(scores[of_item].sum())
        return found


def best_of(items: np.ndarray, scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return at most `k` of these items with a score above 0, best first (ties by index), and the scores' logarithms."""
    kept = np.flatnonzero(scores > 0)
    if len(kept) > k:
        bound = np.partition(scores[kept], len(kept) - k)[len(kept) - k]
        kept = kept[scores[kept] >= bound]
    kept = kept[np.lexsort((items[kept], -scores[kept]))[:k]]
    return items[kept], np.log(scores[kept])


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return the probabilities of these logits (..., V), float32."""
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probabilities: np.ndarray = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return probabilities


def mixer_of(manifest: Mapping[str, Any], tables: Mapping[str, SimilarTable]) -> Mixer | None:
    """Return the mixer that a manifest describes, with the tables of its sources by name; None without one."""
    about = manifest.get("mixer")
    if about is None:
        return None
    sources = {
        name: Source(tables[name], reading["newest"], reading["decay"]) for name, reading in about["sources"].items()
    }
    blends = {
        model: tuple(Blend(*row["history"], row["weights"]) for row in rows) for model, rows in about["blends"].items()
    }
    return Mixer(sources, blends)
