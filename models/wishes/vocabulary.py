"""The words that name items in wishes: categories, title words, whole titles, years and popularity.

All of them come from the items, and a changed item costs no more than its own words. Numpy only.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from models.wishes.dates import Dates, year_in_title
from models.wishes.names import Term, TermNames, is_name
from models.wishes.titles import Titles, forms_of_title
from models.wishes.words import Token, is_stop, stem, stems, words_of

__all__ = ["Term", "Vocabulary", "WishItem", "values_of"]

Key = TypeVar("Key", bound=Hashable)
_MAX_PHRASE = 6
_OLD_YEARS, _RECENT_YEARS = (10.0, 25.0), (2.0, 6.0)
"""Ages in years before the newest item: an item begins to be old, is old; is recent, is no longer recent."""


@dataclass(frozen=True, slots=True)
class WishItem:
    """The words of an item: as in a catalogue, with texts of attributes by name."""

    item_id: str
    title: str
    categories: tuple[str, ...] = ()
    attributes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


class Vocabulary:
    """The terms of a catalogue's items. Thread-safe for reading."""

    def __init__(self, items: Sequence[WishItem]) -> None:
        self.items: Sequence[WishItem] = []
        self.years_V = np.zeros(0, dtype=np.int32)
        self.items_of: Mapping[Term, np.ndarray] = {}
        self._words: Mapping[str, np.ndarray] = {}
        """Items by the stem of each word of their titles and attributes."""
        self._titles_of: Mapping[tuple[str, ...], np.ndarray] = {}
        self._names = TermNames([])
        self._change(dict(enumerate(items)))

    def with_items(self, items: Mapping[int, WishItem]) -> "Vocabulary":
        """Return a vocabulary with these items by index, known or next: at the cost of their own words."""
        changed = copy(self)
        changed._change(items)
        return changed

    def _change(self, items: Mapping[int, WishItem]) -> None:
        before = {index: self.items[index] for index in items if index < len(self.items)}
        self.items = [*self.items, *(None for index in items if index >= len(self.items))]  # type: ignore[list-item]
        self.years_V = np.pad(self.years_V, (0, len(self.items) - len(self.years_V)))
        for index, item in items.items():
            self.items[index] = item
            self.years_V[index] = year_in_title(item.title)
        self.items_of = _changed(self.items_of, before, items, _terms_of)
        self._words = _changed(self._words, before, items, _words_of)
        self._titles_of = _changed(self._titles_of, before, items, lambda item: forms_of_title(item.title))
        self.titles = Titles(self._titles_of)
        if (terms := self._ordered_terms()) != self._names.terms:
            self._names = TermNames(terms)

    def _ordered_terms(self) -> Sequence[Term]:
        """Return the terms in order of their first items, where an item's values are in its own order."""

        def place(term: Term) -> tuple[int, int]:
            first = int(self.items_of[term][0])
            return first, values_of(self.items[first]).index(term)

        return sorted(self.items_of, key=place)

    def find_term(self, tokens: Sequence[Token], at: int) -> tuple[Term, float, int] | None:
        """Return the term of the longest name at a token, its certainty, and the number of tokens."""
        words = []
        for token in tokens[at : at + _MAX_PHRASE]:
            if not token.is_word:
                break
            words.append(token.text)
        for length in range(len(words), 0, -1):
            if length == 1 and is_stop(words[0]):
                return None
            if match := self._names.phrases.get(stems(words[:length])):
                return *match, length
            if length == 2 and (term := self._names.abbreviation(words[:2])):
                return term, 1.0, 2
        return (*match, 1) if words and (match := self._mistyped(words[0])) else None

    def certainty(self, tokens: Sequence[Token], at: int) -> float:
        """Return how certainly a value is named at a token: 1 by its own name, 0 not at all."""
        match = self.find_term(tokens, at)
        return 0.0 if match is None else match[1]

    def _mistyped(self, word: str) -> tuple[Term, float] | None:
        """Return the term that a word names but for one typing error; None for a word of titles and a stop word."""
        if is_stop(word) or stem(word) in self._words:
            return None
        return self._names.mistyped(word)

    def words_scores(self, words: Sequence[str]) -> np.ndarray | None:
        """Return (V,) float32 from 0 to 1: the share of these words, by rarity, in each item's title and attributes."""
        postings = [items for word in words if not is_stop(word) and (items := self._words.get(stem(word))) is not None]
        known = [(items, np.log(1 + len(self.items) / len(items))) for items in postings]
        if not known:
            return None
        scores_V = np.zeros(len(self.items), dtype=np.float32)
        for items, rarity in known:
            scores_V[items] += rarity
        scores_V /= np.float32(sum(rarity for _, rarity in known))
        return scores_V

    def dates_scores(self, dates: Dates) -> np.ndarray:
        """Return (V,) float32 from 0 to 1: how well each item's year fits; 0 for an item without a year."""
        years_V = self.years_V
        if not dates.relative:
            fits_V = (years_V >= dates.first) & (years_V <= dates.last) & (years_V > 0)
            return fits_V.astype(np.float32)
        age_V = np.max(years_V, initial=0) - years_V.astype(np.float32)
        begins, ends = _OLD_YEARS if dates.relative == "old" else _RECENT_YEARS
        old_V = np.clip((age_V - begins) / (ends - begins), 0, 1)
        scores_V: np.ndarray = np.where(years_V > 0, old_V if dates.relative == "old" else 1 - old_V, 0)
        return scores_V.astype(np.float32)

    def mask_of(self, term: Term) -> np.ndarray:
        """Return the items (V,) bool with this value."""
        mask = np.zeros(len(self.items), dtype=bool)
        mask[self.items_of.get(term, [])] = True
        return mask


def values_of(item: WishItem) -> list[Term]:
    """Return the values of an item."""
    own = (("categories", item.categories), *item.attributes.items())
    return [Term(attribute, value) for attribute, values in own for value in values]


def _terms_of(item: WishItem) -> Iterable[Term]:
    return (term for term in values_of(item) if is_name(term.value))


def _words_of(item: WishItem) -> Iterable[str]:
    texts = (item.title, *(value for values in item.attributes.values() for value in values))
    return (stem(word) for text in texts for word in words_of(text) if not is_stop(word))


def _changed(
    items_of: Mapping[Key, np.ndarray],
    before: Mapping[int, WishItem],
    after: Mapping[int, WishItem],
    keys_of: Callable[[WishItem], Iterable[Key]],
) -> Mapping[Key, np.ndarray]:
    """Return each key's items, rising, after some items changed."""
    removed, added = _by_key(before, keys_of), _by_key(after, keys_of)
    updated = dict(items_of)
    for key in removed:
        updated[key] = np.setdiff1d(updated[key], removed[key], assume_unique=True)
    for key, indices in added.items():
        updated[key] = np.union1d(updated[key], indices) if key in updated else np.array(indices)
    return {key: indices for key, indices in updated.items() if len(indices)} if removed else updated


def _by_key(items: Mapping[int, WishItem], keys_of: Callable[[WishItem], Iterable[Key]]) -> dict[Key, list[int]]:
    by_key: dict[Key, list[int]] = defaultdict(list)
    for index in sorted(items):
        for key in dict.fromkeys(keys_of(items[index])):  # in their own order, so that equal runs make equal files
            by_key[key].append(index)
    return by_key
