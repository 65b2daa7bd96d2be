"""The result of reading a wish: understood words, scores of items, and items to exclude. Numpy only.

Shape suffix: V items of the catalogue, then the items that `Reader.with_items` added, in the order given.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class ReadTerms:
    """A wish in the catalogue's own words.

    Args:
        must: Wanted attribute values and dates.
        must_not: Excluded values that the wish states without doubt. Other dislikes lower scores.
        liked: Titles of items that the wish names as examples.
        reader: Parts of the reader that contributed: `keywords`, or `encoder` for keywords and encoder. Empty for a
            wish without a known word.
    """

    must: tuple[str, ...] = ()
    must_not: tuple[str, ...] = ()
    liked: tuple[str, ...] = ()
    reader: str = ""


@dataclass(frozen=True, slots=True)
class Exclusion:
    """A test of an attribute that no shown item may pass: any of these texts, or a year from `first` to `last`."""

    attribute: str
    values: tuple[str, ...] = ()
    first: float | None = None
    last: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """A wish that was read.

    Args:
        understood: The understood terms, for the answer.
        scores: (V,) float32, to be added to log-probabilities of a model; None if the wish prefers no item.
        excluded: (V,) bool, the items that `understood.must_not` excludes; None if it is empty.
        exclusions: The tests that `excluded` was computed from.
        personal: Weight of the model's log-probabilities in the mix (mixing.py).
    """

    understood: ReadTerms
    scores: np.ndarray | None = None
    excluded: np.ndarray | None = None
    exclusions: tuple[Exclusion, ...] = ()
    personal: float = 1.0

    @property
    def is_empty(self) -> bool:
        """Whether the wish changes nothing."""
        return self.scores is None and self.excluded is None
