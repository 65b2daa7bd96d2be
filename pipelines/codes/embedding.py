"""An embedding of each item from its text and from who uses it, such that a new item has one from its text alone.

Text: hashed words and pairs of words, weighted by rarity, reduced by a truncated SVD. Use: the truncated SVD of users by items, on training
events only. What use says of an item is predicted from its text by ridge regression, and the more events an item has, the more its own
use counts. Both parts are of length 1.

Shape suffixes: N items, W hashed words, T size of the text part, U size of the part of use.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from scipy import sparse
from sklearn.feature_extraction.text import HashingVectorizer
from sklearn.utils.extmath import randomized_svd

_NUM_WORDS = 1 << 14
_RIDGE = 1.0
_PRIOR_EVENTS = 5.0
"""An item with this many events is placed half by its own use, half by what its text predicts."""
_words = HashingVectorizer(n_features=_NUM_WORDS, ngram_range=(1, 2), alternate_sign=False, norm=None, dtype=np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class ItemEncoder:
    """What an item's text becomes: `rarity_W`, `text_WT` and `use_TU`, the use that its text predicts."""

    rarity_W: np.ndarray
    text_WT: np.ndarray
    use_TU: np.ndarray

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Return the embeddings of items that nobody has used."""
        text_NT = self._text(texts)
        return np.hstack([text_NT, _unit(text_NT @ self.use_TU)])

    def encode_used(self, texts: Sequence[str], use_NU: np.ndarray, num_events: np.ndarray) -> np.ndarray:
        """Return the embeddings of items with their own use."""
        text_NT, weight_N1 = self._text(texts), (num_events / (num_events + _PRIOR_EVENTS))[:, None]
        predicted_NU = _unit(text_NT @ self.use_TU)
        use = weight_N1 * use_NU + (1 - weight_N1) * predicted_NU
        return np.hstack([text_NT, _unit(use)]).astype(np.float32)

    def _text(self, texts: Sequence[str]) -> np.ndarray:
        return _unit(_unit_rows(_words.transform(texts).multiply(self.rarity_W).tocsr()) @ self.text_WT)


def texts_of(items: pl.DataFrame) -> list[str]:
    """Return each item's title, categories and text as one text, in the order of the rows."""
    rows = items.select("title", "categories", "text").iter_rows()
    return [" ".join((title, *categories, text if text and text != title else "")) for title, categories, text in rows]


def fit_encoder(
    texts: Sequence[str], sequences: Sequence[np.ndarray], size: int, seed: int
) -> tuple[ItemEncoder, np.ndarray]:
    """Learn the encoder and return it with the items' embeddings. `sequences` are the training events, as item indices."""
    counts_NW = _words.transform(texts)
    num_with = np.bincount(counts_NW.indices, minlength=_NUM_WORDS)
    rarity_W = (np.log((1 + len(texts)) / (1 + num_with)) + 1).astype(np.float32)
    _, _, right = _svd(_unit_rows(counts_NW.multiply(rarity_W).tocsr()), size, seed)
    num_events, use_NU = _use(sequences, len(texts), size, seed)
    text_NT = _unit(_unit_rows(counts_NW.multiply(rarity_W).tocsr()) @ right.T)
    used = num_events > 0
    weighted_NT = text_NT[used] * num_events[used, None]
    gram_TT = weighted_NT.T @ text_NT[used] + _RIDGE * np.eye(text_NT.shape[1])
    use_TU = np.linalg.solve(gram_TT, weighted_NT.T @ use_NU[used]).astype(np.float32)
    encoder = ItemEncoder(rarity_W, np.ascontiguousarray(right.T), use_TU)
    return encoder, encoder.encode_used(texts, use_NU, num_events)


def _use(sequences: Sequence[np.ndarray], num_items: int, size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return each item's number of events, and its part of use: the right singular vectors of users by items, both scaled by degree."""
    items = np.concatenate([np.zeros(0, dtype=np.int64), *sequences])
    users = np.repeat(np.arange(len(sequences)), [len(sequence) for sequence in sequences])
    shape = (max(1, len(sequences)), num_items)
    used = sparse.csr_matrix((np.ones(len(items), dtype=np.float32), (users, items)), shape=shape)
    used.data = np.minimum(used.data, 1)
    scaled = sparse.diags_array(_root(used.sum(axis=1))) @ used @ sparse.diags_array(_root(used.sum(axis=0)))
    _, strengths, right = _svd(scaled.tocsr(), size, seed)
    return np.bincount(items, minlength=num_items).astype(np.float32), _unit(right.T * strengths)


def _root(degrees: np.ndarray) -> np.ndarray:
    roots: np.ndarray = (1 / np.sqrt(np.maximum(1, np.asarray(degrees).ravel()))).astype(np.float32)
    return roots


def _svd(matrix: sparse.csr_matrix, size: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rank = min(size, *matrix.shape)
    left, strengths, right = randomized_svd(matrix, rank, random_state=seed)
    return left.astype(np.float32), strengths.astype(np.float32), right.astype(np.float32)


def _unit_rows(matrix: sparse.csr_matrix) -> sparse.csr_matrix:
    norms = np.sqrt(np.asarray(matrix.multiply(matrix).sum(axis=1)).ravel())
    scaled: sparse.csr_matrix = sparse.diags_array((1 / np.maximum(norms, 1e-9)).astype(np.float32)) @ matrix
    return scaled


def _unit(rows: np.ndarray) -> np.ndarray:
    unit: np.ndarray = (rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)).astype(np.float32)
    return unit
