"""Which items of a catalogue have texts like another one: an index from words to items. Numpy only.

Texts are sets of words, weighted by rarity, and compared by the cosine (Salton and Buckley 1988), as scikit-learn's TfidfVectorizer with `binary=True` does. Words are
known by a hash of 20 bits, so that a million items' index takes 45 MB and no table of words.

Shape suffixes: V items, W hashed words, P places of words in items.
"""

import re
from array import array
from collections.abc import Iterable, Sequence
from zlib import crc32

import numpy as np

_WORD = re.compile(r"\w\w+")
_NUM_WORDS = 1 << 20


class WordIndex:
    """The items of each word. Does not change."""

    def __init__(self, texts: Iterable[str], rarity_W: np.ndarray | None = None) -> None:
        """Index texts, one an item. `rarity_W` is another index's; without it rare words are those of these texts."""
        words, lengths = array("i"), array("i")
        for text in texts:
            found = _words_of(text)
            words.extend(found)
            lengths.append(len(found))
        self.num_items = len(lengths)
        words_P = np.frombuffer(words, dtype=np.int32) if words else np.zeros(0, dtype=np.int32)
        owners_P = np.repeat(np.arange(self.num_items, dtype=np.int32), lengths)
        num_with_W = np.bincount(words_P, minlength=_NUM_WORDS)
        if rarity_W is None:
            rarity_W = (np.log((1 + self.num_items) / (1 + num_with_W)) + 1).astype(np.float32)
        self.rarity_W = rarity_W
        squares_V = np.bincount(owners_P, rarity_W[words_P].astype(np.float64) ** 2, minlength=self.num_items)
        self._lengths_V = np.sqrt(squares_V).astype(np.float32)
        self._items_P = owners_P[np.argsort(words_P, kind="stable")]
        self._starts_W = np.concatenate([[0], np.cumsum(num_with_W)])

    def nearest(self, text: str, num: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of at most `num` items that share a word with a text, nearest first (ties by index), and their cosines."""
        words = _words_of(text)
        if not words:
            return np.zeros(0, dtype=np.int64), np.zeros(0)
        postings = [self._items_P[self._starts_W[word] : self._starts_W[word + 1]] for word in words]
        squares = [float(self.rarity_W[word]) ** 2 for word in words]
        found_P = np.concatenate(postings)
        shared_P = np.repeat(squares, [len(items) for items in postings])
        items, places = np.unique(found_P, return_inverse=True)
        cosines = np.bincount(places, shared_P, minlength=len(items)) / (self._lengths_V[items] * sum(squares) ** 0.5)
        best = np.argsort(-cosines, kind="stable")[:num]
        return items[best].astype(np.int64), cosines[best]


def text_of(title: str, item_id: str, categories: Sequence[str]) -> str:
    """Return an item's title and categories as one text. A title that is the id describes nothing and is left out."""
    return " ".join(("" if title == item_id else title, *categories))


def _words_of(text: str) -> list[int]:
    return sorted({crc32(word.encode()) % _NUM_WORDS for word in _WORD.findall(text.lower())})
