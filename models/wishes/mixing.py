"""Mixes a reading of a wish with what the tiers rank for a user. Numpy only; no torch.

    score of an item = personal * log(probability by the tiers) + weight * score by the reader

Each tier leaves the fraction `floor` of probability to the tiers below it, and the last tier leaves it to all items
alike: an item that a stored list or a beam does not name is found where its words fit. The bundle's manifest holds
weight and floor, which validation chose; one pair serves all tiers. `personal` belongs to the reading.

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
    """The weight of the reader, and the fraction of probability that a tier leaves to lower tiers."""

    weight: float = 1.0
    floor: float = 0.1

    def scores(
        self, ranked: Sequence[tuple[np.ndarray, np.ndarray]], reading: Reading | None, num_items: int
    ) -> np.ndarray:
        """Return the scores (V,) float32 of `num_items` items.

        `ranked` holds each tier's items (R,) and their probabilities (R,), the answering tier first. An item that the
        reader does not know has its lowest score.
        """
        own_V, rest = np.zeros(num_items), 1.0
        for items_R, probabilities_R in ranked:
            own_V[items_R] += rest * (1 - self.floor) * probabilities_R
            rest *= self.floor
        scores_V = np.log(own_V + rest / max(1, num_items))
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
