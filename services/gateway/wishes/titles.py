"""Finds items whose titles have the words of a search: equal words, beginnings of words, and words with typing errors.

A word counts by its rarity in titles. A word that no title has is compared with all words of titles by RapidFuzz (one
typing error from four letters on, two from eight on); swapped letters are one error. Words are split by Arrow outside
the interpreter's lock. A word that a sign excludes ("-comedy") finds nothing.

Shape suffixes: V items, W distinct words, P pairs of word and item.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rapidfuzz.distance import OSA
from rapidfuzz.process import cdist

_REFUSED = re.compile(r'(?<!\S)[-!](?:"[^"]*"|\S+)')
"""A word or quotation that a sign excludes."""
_NOT_WORDS, _MARKS = r"[^\p{L}\p{N}]+", r"\p{M}"
_MAX_WORDS = 16
_LEAST_MATCH = 0.6
_PREFIX, _TYPING_ERROR = 0.9, 0.75
_LONG = ((8, 2), (4, 1))
"""From how many letters on a word may have how many typing errors."""
_AFTER_ALL = chr(0x10FFFF)


class TitleIndex:
    """The words of some titles. Immutable."""

    def __init__(self, titles: Sequence[str]) -> None:
        words, owners_P = _words_of(titles)
        coded = words.dictionary_encode()
        distinct = coded.dictionary.to_pylist()
        order = sorted(range(len(distinct)), key=distinct.__getitem__)
        self._words = [distinct[index] for index in order]
        rank_W = np.empty(len(order), dtype=np.int64)
        rank_W[order] = np.arange(len(order))
        words_P = rank_W[np.asarray(coded.indices)] if order else np.zeros(0, dtype=np.int64)
        self._num_words_V = np.bincount(owners_P, minlength=len(titles))
        self._items_P = owners_P[np.argsort(words_P, kind="stable")]
        num_with_W = np.bincount(words_P, minlength=len(order))
        self._starts_W = np.concatenate([[0], np.cumsum(num_with_W)])
        self._rarity_W = np.log((1 + len(titles)) / (1 + num_with_W)) + 1
        self._highest = float(np.log(1 + len(titles)) + 1)

    def matches(self, query: str) -> np.ndarray:
        """Return how well each title matches (V,) float32: 0, or from 0.6 up to 1 for a title of just these words."""
        words = list(dict.fromkeys(_words_of([_REFUSED.sub(" ", query)])[0].to_pylist()))[:_MAX_WORDS]
        sums_V, total = np.zeros(len(self._num_words_V)), 0.0
        for word in words:
            places, matches = self._near(word)
            rarity = float(self._rarity_W[places].max(initial=0.0)) or self._highest
            total += rarity
            own_V = np.zeros(len(sums_V))
            for rank, match in zip(places, matches, strict=True):
                items = self._items_P[self._starts_W[rank] : self._starts_W[rank + 1]]
                own_V[items] = np.maximum(own_V[items], match)
            sums_V += rarity * own_V
        matches_V = sums_V / max(total, 1e-9)
        matches_V[matches_V < _LEAST_MATCH] = 0
        covered_V = np.minimum(1.0, len(words) / np.maximum(1, self._num_words_V))
        return (matches_V * (0.9 + 0.1 * covered_V)).astype(np.float32)

    def _near(self, word: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the ranks of the words that a word may mean, and how well each matches."""
        first, end = bisect_left(self._words, word), bisect_left(self._words, word + _AFTER_ALL)
        if first < end:
            places = np.arange(first, end)
            is_equal = self._words[first] == word
            return places, np.where((places == first) & is_equal, 1.0, _PREFIX)
        allowed = next((errors for letters, errors in _LONG if len(word) >= letters), 0)
        if not allowed or not self._words:
            return np.zeros(0, dtype=np.int64), np.zeros(0)
        distances_W = cdist([word], self._words, scorer=OSA.distance, score_cutoff=allowed, dtype=np.uint8)[0]
        places = np.flatnonzero(distances_W <= allowed)
        return places, _TYPING_ERROR - 0.1 * (distances_W[places].astype(float) - 1)


def _words_of(texts: Sequence[str]) -> tuple[pa.StringArray, np.ndarray]:
    """Return the words of all texts in lower case without accents, and the index (P,) of the text of each word."""
    plain = pc.utf8_normalize(pc.utf8_lower(pa.array(texts, pa.string())), "NFKD")
    lists = pc.split_pattern_regex(pc.replace_substring_regex(plain, _MARKS, ""), _NOT_WORDS)
    words, owners = lists.flatten(), pc.list_parent_indices(lists)
    is_word = pc.greater(pc.utf8_length(words), 0)
    return words.filter(is_word), np.asarray(owners.filter(is_word), dtype=np.int64)
