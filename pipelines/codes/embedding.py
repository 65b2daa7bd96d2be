"""Embeds each item from its text and from its users; a new item needs only its text.

Training uses both parts too: text (pipelines.training.start.text_rows) and use
(pipelines.training.start.from_interactions).

Text: hashed words and pairs of words, weighted by rarity, reduced by a truncated SVD. Use: the truncated SVD of users
by items, on training events only. Ridge regression predicts an item's use part from its text; the more events an item
has, the more its own use counts. Both parts have length 1.

Shape suffixes: N items, W hashed words, T size of the text part, U size of the part of use.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from scipy import sparse
from threadpoolctl import threadpool_limits

from models.catalogue import Catalogue
from services.items.words import text_of

_TEXTS = "item_texts.parquet"
_NUM_WORDS = 1 << 14
_RIDGE = 1.0
PRIOR_EVENTS = 5.0
"""An item with this many events is placed half by its own use, half by what its text predicts."""


@dataclass(frozen=True, slots=True, eq=False)
class HashedTextEncoder:
    """How rare each hashed word is, and the vector of each."""

    rarity_W: np.ndarray
    text_WT: np.ndarray

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Return the texts' vectors (N, T) float32, of length 1."""
        if not texts:  # scikit-learn fails with StopIteration
            return np.zeros((0, self.text_WT.shape[1]), dtype=np.float32)
        return unit(_weighted(_counts(texts), self.rarity_W) @ self.text_WT)


@dataclass(frozen=True, slots=True, eq=False)
class ItemEncoder:
    """What an item's text becomes: its vector, and by `use_TU` the use that this predicts."""

    text: HashedTextEncoder
    use_TU: np.ndarray

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Return the embeddings of items that nobody has used."""
        text_NT = self.text.encode(texts)
        return np.hstack([text_NT, unit(text_NT @ self.use_TU)])

    def encode_used(self, texts: Sequence[str], use_NU: np.ndarray, num_events: np.ndarray) -> np.ndarray:
        """Return the embeddings of items with their own use."""
        text_NT, weight_N1 = self.text.encode(texts), (num_events / (num_events + PRIOR_EVENTS))[:, None]
        predicted_NU = unit(text_NT @ self.use_TU)
        use = weight_N1 * use_NU + (1 - weight_N1) * predicted_NU
        return np.hstack([text_NT, unit(use)]).astype(np.float32)


def texts_of(items: pl.DataFrame) -> list[str]:
    """Join title, categories and text of each item, in row order.

    A title that equals the id describes nothing and is skipped.
    """
    rows = items.select("item_id", "title", "categories", "text").iter_rows()
    return [
        " ".join(("" if title == item_id else title, *categories, text if text and text != title else ""))
        for item_id, title, categories, text in rows
    ]


def texts_in(catalogue: Catalogue) -> list[str]:
    """Join title and categories of each item of a bundle, which has no other text of the items."""
    return [text_of(*item) for item in zip(catalogue.titles, catalogue.item_ids, catalogue.categories, strict=True)]


def save_texts(texts: Sequence[str], tokenized: Path) -> None:
    """Write the items' texts, in the catalogue's order, next to the catalogue."""
    pl.DataFrame({"text": texts}, schema={"text": pl.String}).write_parquet(tokenized / _TEXTS)


def read_texts(tokenized: Path) -> list[str]:
    """Read the texts that `save_texts` wrote; empty without a file."""
    path = tokenized / _TEXTS
    return pl.read_parquet(path)["text"].to_list() if path.exists() else []


def share_of_distinct_texts(texts: Sequence[str]) -> float:
    """Return the share of items with a text that no other item has; 0 without items."""
    return sum(number == 1 for number in Counter(texts).values()) / max(1, len(texts))


def fit_text(texts: Sequence[str], size: int, seed: int) -> HashedTextEncoder:
    """Learn the encoder of texts from a catalogue's own.

    Its vectors have `size` numbers, or as many as there are texts if those are fewer.
    """
    counts_NW = _counts(texts)
    num_with = np.bincount(counts_NW.indices, minlength=_NUM_WORDS)
    rarity_W = (np.log((1 + len(texts)) / (1 + num_with)) + 1).astype(np.float32)
    _, _, right = _svd(_weighted(counts_NW, rarity_W), size, seed)
    return HashedTextEncoder(rarity_W, np.ascontiguousarray(right.T))


def fit_encoder(
    texts: Sequence[str], sequences: Sequence[np.ndarray], size: int, seed: int
) -> tuple[ItemEncoder, np.ndarray]:
    """Learn the encoder and return it with the items' embeddings.

    `sequences` are the training events, as item indices.
    """
    text = fit_text(texts, size, seed)
    num_events, use_NU = item_use(sequences, len(texts), size, seed)
    text_NT = text.encode(texts)
    used = num_events > 0
    weighted_NT = text_NT[used] * num_events[used, None]
    gram_TT = weighted_NT.T @ text_NT[used] + _RIDGE * np.eye(text_NT.shape[1])
    use_TU = np.linalg.solve(gram_TT, weighted_NT.T @ use_NU[used]).astype(np.float32)
    encoder = ItemEncoder(text, use_TU)
    return encoder, encoder.encode_used(texts, use_NU, num_events)


def item_use(sequences: Sequence[np.ndarray], num_items: int, size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return each item's event count and unit vector: right singular vectors of users by items, both scaled by degree.

    Vectors have `size` numbers, or as many as there are users or items if those are fewer; one of an item without
    events is 0.
    """
    items = np.concatenate([np.zeros(0, dtype=np.int64), *sequences])
    users = np.repeat(np.arange(len(sequences)), [len(sequence) for sequence in sequences])
    shape = (max(1, len(sequences)), num_items)
    used = sparse.csr_matrix((np.ones(len(items), dtype=np.float32), (users, items)), shape=shape)
    used.data = np.minimum(used.data, 1)
    scaled = sparse.diags_array(_root(used.sum(axis=1))) @ used @ sparse.diags_array(_root(used.sum(axis=0)))
    _, strengths, right = _svd(scaled.tocsr(), size, seed)
    return np.bincount(items, minlength=num_items).astype(np.float32), unit(right.T * strengths)


def unit(rows: np.ndarray) -> np.ndarray:
    """Return the rows normalised to length 1; zero rows stay."""
    unit: np.ndarray = (rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)).astype(np.float32)
    return unit


def _counts(texts: Sequence[str]) -> sparse.csr_matrix:
    """Return how often each hashed word and pair of words is in each text (N, W)."""
    from sklearn.feature_extraction.text import HashingVectorizer  # slow to import, and ranks need none

    words = HashingVectorizer(
        n_features=_NUM_WORDS, ngram_range=(1, 2), alternate_sign=False, norm=None, dtype=np.float32
    )
    return words.transform(texts)


def _root(degrees: np.ndarray) -> np.ndarray:
    roots: np.ndarray = (1 / np.sqrt(np.maximum(1, np.asarray(degrees).ravel()))).astype(np.float32)
    return roots


def _svd(matrix: sparse.csr_matrix, size: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    from sklearn.utils.extmath import randomized_svd

    rank = min(size, *matrix.shape)
    with threadpool_limits(1):  # fixed summation order: a resumed fit has the vectors that it began with
        left, strengths, right = randomized_svd(matrix, rank, random_state=seed)
    return left.astype(np.float32), strengths.astype(np.float32), right.astype(np.float32)


def _weighted(counts_NW: sparse.csr_matrix, rarity_W: np.ndarray) -> sparse.csr_matrix:
    """Return the counts by rarity, each row of length 1."""
    matrix = counts_NW.multiply(rarity_W).tocsr()
    norms = np.sqrt(np.asarray(matrix.multiply(matrix).sum(axis=1)).ravel())
    scaled: sparse.csr_matrix = sparse.diags_array((1 / np.maximum(norms, 1e-9)).astype(np.float32)) @ matrix
    return scaled
