"""What a reader understood of a wish, and how well each item fits it. Numpy only; no torch.

A wish is a short text such as "an old comedy, nothing romantic". A reader finds the catalogue's own words in it, as
terms: an attribute and a value. Confident terms limit the items; every other word only moves scores.

Shape suffixes: V items, of the catalogue and then those that the reader has taken since.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

KEYWORDS = "keywords"


@dataclass(frozen=True, slots=True)
class Term:
    """A value of an attribute, as items have it; `categories` for a category."""

    attribute: str
    value: str


@dataclass(frozen=True, slots=True)
class Understood:
    """The terms of a wish in words, for people: required, excluded, and liked. `reader` names the reader."""

    must: tuple[str, ...]
    must_not: tuple[str, ...]
    liked: tuple[str, ...]
    reader: str


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """A wish as read.

    `scores` (V,) float32 are log-probabilities of the items given the wish, or None if it says nothing of any item.
    Items have each of the `required` terms and none of the `excluded` terms.
    """

    understood: Understood
    scores: np.ndarray | None
    required: tuple[Term, ...] = ()
    excluded: tuple[Term, ...] = ()


def normalised(text: str) -> str:
    """Return a text for comparison: compatible characters and cases unified, single spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def key_of(text: str, session_wishes: Sequence[str]) -> tuple[str, ...]:
    """Return what a reading depends on: the normalised texts of a wish and of the wishes before it."""
    return (normalised(text), *map(normalised, session_wishes))
