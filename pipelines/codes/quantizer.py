"""Residual k-means: each level's code is the centroid nearest to the residual of the levels above, balanced by prices.

A code's price is added to the squared distance, so a crowded code takes fewer items and an empty code more; the same
rule assigns old and new items. The centroids are the best of several k-means++ starts on a sample. Prices move until no
code has more than twice the mean number of items, or for a fixed number of rounds.

Shape suffixes: N items, D size of an embedding, S codes of the level.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from threadpoolctl import threadpool_limits

_SAMPLES_PER_CODE = 256
_STARTS = 4
_ITERATIONS = 20
_ROUNDS = 30
_STEP = 0.1
_MOST_LOAD = 2.0
_CHUNK = 8_192


@dataclass(frozen=True, slots=True, eq=False)
class CodeLevel:
    """The codes of one level: `centroids_SD` and `prices_S`."""

    centroids_SD: np.ndarray
    prices_S: np.ndarray

    def costs(self, residuals_ND: np.ndarray) -> np.ndarray:
        """Return squared distance plus price, less each item's own square: the smallest is the item's code. (N, S)."""
        squares_S = (self.centroids_SD**2).sum(axis=1) + self.prices_S
        costs: np.ndarray = squares_S - 2 * residuals_ND @ self.centroids_SD.T
        return costs

    def assign(self, residuals_ND: np.ndarray) -> np.ndarray:
        """Return each item's code (N,) int32."""
        chunks = [self.costs(residuals_ND[rows]).argmin(axis=1) for rows in _chunks(len(residuals_ND))]
        return np.concatenate([np.zeros(0, dtype=np.int32), *chunks]).astype(np.int32)

    def leave(self, residuals_ND: np.ndarray, codes_N: np.ndarray) -> np.ndarray:
        """Return what these codes leave of the items."""
        left: np.ndarray = residuals_ND - self.centroids_SD[codes_N]
        return left


def fit_level(residuals_ND: np.ndarray, size: int, seed: int) -> CodeLevel:
    """Learn the centroids and prices of one level. `size` is at most the number of items."""
    from sklearn.cluster import KMeans  # slow to import
    from sklearn.exceptions import ConvergenceWarning

    rng = np.random.default_rng(seed)
    sample = residuals_ND
    if len(sample) > size * _SAMPLES_PER_CODE:
        sample = sample[rng.choice(len(sample), size * _SAMPLES_PER_CODE, replace=False)]
    with threadpool_limits(1), warnings.catch_warnings():  # one thread: sums in one order everywhere
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer different residuals than codes leave codes dead
        clustering = KMeans(size, init="k-means++", n_init=_STARTS, max_iter=_ITERATIONS, random_state=seed).fit(sample)
    return _balanced(np.ascontiguousarray(clustering.cluster_centers_, dtype=np.float32), sample)


def _balanced(centroids_SD: np.ndarray, sample_ND: np.ndarray) -> CodeLevel:
    """Return the level with the prices of the round whose largest code is smallest.

    Prices move by the distances within a code.
    """
    size, share = len(centroids_SD), len(sample_ND) / len(centroids_SD)
    level = best = CodeLevel(centroids_SD, np.zeros(size, dtype=np.float32))
    codes_N = level.assign(sample_ND)
    distances_N = ((sample_ND - centroids_SD[codes_N]) ** 2).sum(axis=1)
    loads_S = np.bincount(codes_N, minlength=size)
    inner_S = np.bincount(codes_N, weights=distances_N, minlength=size) / np.maximum(1, loads_S)
    least = int(loads_S.max())
    for _ in range(_ROUNDS):
        if loads_S.max() <= _MOST_LOAD * share:
            break
        moved_S = _STEP * inner_S * np.log((loads_S + 1) / (share + 1))
        means_SD = _means(sample_ND, codes_N, level.centroids_SD)
        level = CodeLevel(means_SD, (level.prices_S + moved_S).astype(np.float32))
        codes_N = level.assign(sample_ND)
        loads_S = np.bincount(codes_N, minlength=size)
        if loads_S.max() < least:
            least, best = int(loads_S.max()), level
    return best


def _means(sample_ND: np.ndarray, codes_N: np.ndarray, before_SD: np.ndarray) -> np.ndarray:
    """Return the mean of each code's items, and of a code without items the centroid that it had."""
    order = np.argsort(codes_N, kind="stable")
    present, starts, loads = np.unique(codes_N[order], return_index=True, return_counts=True)
    means_SD = before_SD.copy()
    means_SD[present] = np.add.reduceat(sample_ND[order], starts) / loads[:, None]
    return means_SD


def _chunks(num_rows: int) -> Iterator[slice]:
    return (slice(start, start + _CHUNK) for start in range(0, num_rows, _CHUNK))
