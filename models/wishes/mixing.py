"""Mixes a reading of a wish with the tiers' rankings for a user. Numpy only; no torch.

    score of an item = personal * log(probability by the tiers) + weight * score by the reader

Each tier counts `floor` times as much as the tier above it, and all items alike have the fraction `floor` of
probability: an item that a stored list or a beam does not name is found where its words fit. The bundle's manifest
holds weight and floor, which validation chose; one pair serves all tiers. `personal` belongs to the reading.

Shape suffixes: V items, R items of one ranking.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from models.wishes.reading import Reading

WISHES = "wishes"
"""The manifest's key and the bundle's folder."""


@dataclass(frozen=True, slots=True)
class WishMix:
    """The weight of the reader, and the fraction of probability that the tiers leave to all items alike."""

    weight: float = 1.0
    floor: float = 0.1

    def scores(
        self, ranked: Sequence[tuple[np.ndarray, np.ndarray]], reading: Reading | None, num_items: int
    ) -> np.ndarray:
        """Return the scores (V,) float32 of `num_items` items.

        `ranked` holds each tier's items (R,) and their probabilities (R,), the answering tier first. An item that the
        reader does not know has its lowest score.
        """
        own_V, shares = np.zeros(num_items), self.floor ** np.arange(len(ranked))
        for (items_R, probabilities_R), share in zip(ranked, shares / max(1e-9, shares.sum()), strict=True):
            own_V[items_R] += share * probabilities_R
        scores_V = np.log((1 - self.floor) * own_V + self.floor / max(1, num_items))
        if reading is not None and reading.scores is not None:
            num = min(num_items, len(reading.scores))
            scores_V *= reading.personal
            scores_V[:num] += self.weight * reading.scores[:num]
            scores_V[num:] += self.weight * float(reading.scores.min())
        return scores_V.astype(np.float32)


def wish_mix_of(manifest: Mapping[str, Any]) -> WishMix:
    """Return the weights in a bundle's manifest; the defaults in one without."""
    about = manifest.get(WISHES, {})
    return WishMix(**{name: float(about[name]) for name in ("weight", "floor") if name in about})
