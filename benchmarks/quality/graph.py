"""A baseline without training: a graph of item successions, read at a user's last five items, plus text similarity.

An edge counts how often an item followed another within five steps, with less weight for further steps, as a fraction
of the edges that leave the item. The constants below were chosen on validation labels.

Shape suffixes: V items, B histories, E text.
"""

from collections.abc import Sequence

import numpy as np
from scipy import sparse

from pipelines.codes.embedding import fit_text

_NEWEST = 5
_DECAY = 0.5
"""Weight of an item relative to the next item."""
_TEXT_SHARE = 0.05
"""Weight of a text cosine relative to the fraction of an edge."""
_TEXT_SIZE = 256


class TransitionGraph:
    """Scores histories over the whole catalogue. `texts` are the items'."""

    def __init__(self, sequences: Sequence[np.ndarray], texts: Sequence[str]) -> None:
        counts_VV = sparse.csr_matrix((len(texts), len(texts)))
        for step in range(1, _NEWEST + 1):
            before, after = (
                np.concatenate([np.zeros(0, dtype=np.int64), *parts])
                for parts in zip(*((items[:-step], items[step:]) for items in sequences), strict=True)
            )
            ones = np.full(len(before), 1 / step)
            counts_VV += sparse.csr_matrix((ones, (before, after)), shape=counts_VV.shape)
        leaving_V = np.maximum(np.asarray(counts_VV.sum(axis=1)).ravel(), 1e-9)
        self._share_VV = (sparse.diags_array(1 / leaving_V) @ counts_VV).tocsr()
        text_VE = fit_text(texts, _TEXT_SIZE, seed=0).encode(texts)
        self._text_VE = text_VE / np.maximum(np.linalg.norm(text_VE, axis=1, keepdims=True), 1e-9)

    def __call__(self, histories: Sequence[np.ndarray]) -> np.ndarray:
        """Score histories -> (B, V)."""
        rows = [history[-_NEWEST:] for history in histories]
        owners = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        weights = np.concatenate([_DECAY ** np.arange(len(row))[::-1] for row in rows])
        shape = (len(rows), len(self._text_VE))
        newest_BV = sparse.csr_matrix((weights, (owners, np.concatenate(rows))), shape=shape)
        alike_BV = (newest_BV @ self._text_VE) @ self._text_VE.T
        scores_BV: np.ndarray = (newest_BV @ self._share_VV).toarray() + _TEXT_SHARE * np.maximum(alike_BV, 0)
        return scores_BV
