"""Finds items of a catalogue with similar texts: an index from words to items.

Texts are sets of words, weighted by rarity, and compared by the cosine (Salton and Buckley 1988), as in scikit-learn's
TfidfVectorizer with `binary=True`. Words are hashed to 20 bits, so that no table of words is needed, and are split by
Arrow outside the interpreter's lock. A word of very many items finds no items: it says little and costs most.

Shape suffixes: V items, W hashed words, D distinct words, P pairs of word and item.
"""

from collections.abc import Sequence
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_NOT_WORDS = r"[^\p{L}\p{M}\p{N}_]+"
_NUM_WORDS = 1 << 20
_MOST_ITEMS = 20_000
"""Maximum number of items of a word that finds items."""
_TEXTS_AT_ONCE = 1 << 15
_NONE = np.zeros(0, dtype=np.int32)


class WordIndex:
    """The items of each word. Immutable."""

    def __init__(self, texts: Sequence[str], rarity_W: np.ndarray | None = None) -> None:
        """Index texts, one per item.

        `rarity_W` comes from another index; by default the rarity in these texts is used.
        """
        self.num_items = len(texts)
        parts = [
            _words_of(texts[first : first + _TEXTS_AT_ONCE], first) for first in range(0, len(texts), _TEXTS_AT_ONCE)
        ]
        words_P, owners_P = (np.concatenate([_NONE, *(part[which] for part in parts)]) for which in (0, 1))
        num_with_W = np.bincount(words_P, minlength=_NUM_WORDS)
        if rarity_W is None:
            rarity_W = (np.log((1 + self.num_items) / (1 + num_with_W)) + 1).astype(np.float32)
        self.rarity_W = rarity_W
        squares_V = np.bincount(owners_P, rarity_W[words_P].astype(np.float64) ** 2, minlength=self.num_items)
        self._lengths_V = np.sqrt(squares_V).astype(np.float32)
        self._items_P = owners_P[np.argsort(words_P, kind="stable")]
        self._starts_W = np.concatenate([[0], np.cumsum(num_with_W)])

    def nearest(self, text: str, num: int) -> tuple[np.ndarray, np.ndarray]:
        """Return at most `num` items that share a word with a text, nearest first (ties by index): indices and cosines.

        The cosine is symmetric: it does not depend on which text is indexed.
        """
        words = _words_of([text])[0]
        squares = self.rarity_W[words].astype(np.float64) ** 2
        postings = [self._items_P[self._starts_W[word] : self._starts_W[word + 1]] for word in words]
        finding = [
            (items, square) for items, square in zip(postings, squares, strict=True) if len(items) <= _MOST_ITEMS
        ]
        if not finding:
            return np.zeros(0, dtype=np.int64), np.zeros(0)
        found_P = np.concatenate([items for items, _ in finding])
        shared_P = np.repeat([square for _, square in finding], [len(items) for items, _ in finding])
        items, places = np.unique(found_P, return_inverse=True)
        length = np.sqrt(np.bincount(np.zeros(len(words), dtype=np.int64), squares)).astype(np.float32)
        lengths = self._lengths_V[items].astype(np.float64) * length
        cosines = np.bincount(places, shared_P, minlength=len(items)) / lengths
        best = np.argsort(-cosines, kind="stable")[:num]
        return items[best].astype(np.int64), cosines[best]


def text_of(title: str, item_id: str, categories: Sequence[str]) -> str:
    """Join an item's title and categories as one text. A title that equals the id describes nothing and is skipped."""
    return " ".join(("" if title == item_id else title, *categories))


def _words_of(texts: Sequence[str], first: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct words of two letters and more of each text, sorted by text and hash.

    Two arrays (P,) int32: hashes, and the index of the text, counted from `first`.
    """
    lists = pc.split_pattern_regex(pc.utf8_lower(pa.array(texts, pa.string())), _NOT_WORDS)
    words, owners = lists.flatten(), pc.list_parent_indices(lists)
    is_word = pc.greater(pc.utf8_length(words), 1)
    coded = words.filter(is_word).dictionary_encode()
    hashes_D = np.array([crc32(word.encode()) % _NUM_WORDS for word in coded.dictionary.to_pylist()], dtype=np.int64)
    keys_P = np.asarray(owners.filter(is_word), dtype=np.int64) * _NUM_WORDS
    if len(keys_P):
        keys_P = np.unique(keys_P + hashes_D[np.asarray(coded.indices)])
    return (keys_P % _NUM_WORDS).astype(np.int32), (keys_P // _NUM_WORDS + first).astype(np.int32)
