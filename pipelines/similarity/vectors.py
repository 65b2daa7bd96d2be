"""The nearest items by cosine: exact in a small catalogue, among the items of the nearest clusters in a large one.

Shape suffixes: V items, D size of a vector, C candidates of an item, Q queried items, G clusters.
"""

import warnings
from typing import TYPE_CHECKING

import numpy as np
from threadpoolctl import threadpool_limits

from models.similar import NONE
from pipelines.codes.embedding import unit
from pipelines.runner.stage import Progress, silent
from pipelines.similarity.co_visits import Neighbours

if TYPE_CHECKING:
    from sklearn.cluster import KMeans

_MOST_COMPARED_WHOLE = 20_000
_IN_CLUSTER, _SAMPLED_IN_CLUSTER, _CLUSTERS_SEARCHED = 128, 20, 24
_ITERATIONS = 8
_CHUNK, _COSINES_AT_ONCE = 512, 1 << 24


def nearest(vectors_VD: np.ndarray, num_candidates: int, progress: Progress = silent) -> Neighbours:
    """Return the items with the highest cosine for each item, best first."""
    unit_VD, num_items = unit(vectors_VD), len(vectors_VD)
    if num_items <= _MOST_COMPARED_WHOLE:
        return nearest_of(np.arange(num_items), unit_VD, num_candidates)
    with threadpool_limits(1):  # same summation order everywhere
        return _nearest_in_clusters(unit_VD, num_candidates, progress)


def nearest_of(asked_Q: np.ndarray, unit_VD: np.ndarray, num_candidates: int) -> Neighbours:
    """Return the nearest of all items for some of them, by exact comparison. Vectors have length 1."""
    size = max(1, min(_CHUNK, _COSINES_AT_ONCE // max(1, len(unit_VD))))
    parts = [
        _best(asked_Q[first : first + size], np.arange(len(unit_VD)), unit_VD, num_candidates)
        for first in range(0, len(asked_Q), size)
    ]
    empty = np.zeros((0, num_candidates))
    return Neighbours(
        np.concatenate([empty.astype(np.int32), *(part.items_VC for part in parts)]),
        np.concatenate([empty.astype(np.float32), *(part.figures_VC for part in parts)]),
    )


def _nearest_in_clusters(unit_VD: np.ndarray, num_candidates: int, progress: Progress) -> Neighbours:
    num_items = len(unit_VD)
    num_clusters = num_items // _IN_CLUSTER
    sample = np.random.default_rng(0).choice(num_items, min(num_items, num_clusters * _SAMPLED_IN_CLUSTER), False)
    centroids_GD = k_means(unit_VD[sample], num_clusters).cluster_centers_.astype(np.float32)
    chunks = range(0, num_items, _CHUNK)
    cluster_V = np.concatenate([distances(unit_VD[first : first + _CHUNK], centroids_GD).argmin(1) for first in chunks])
    order = np.argsort(cluster_V, kind="stable")
    starts_G = np.searchsorted(cluster_V[order], np.arange(num_clusters + 1))
    items_VC = np.full((num_items, num_candidates), NONE, dtype=np.int32)
    figures_VC = np.zeros((num_items, num_candidates), dtype=np.float32)
    for cluster in range(num_clusters):
        members = order[starts_G[cluster] : starts_G[cluster + 1]]
        if not len(members):
            continue
        near_G = np.argsort(distances(centroids_GD[cluster : cluster + 1], centroids_GD)[0])[:_CLUSTERS_SEARCHED]
        compared = np.sort(np.concatenate([order[starts_G[near] : starts_G[near + 1]] for near in near_G]))
        for first in range(0, len(members), _CHUNK):
            asked = members[first : first + _CHUNK]
            best = _best(asked, compared, unit_VD, num_candidates)
            items_VC[asked], figures_VC[asked] = best.items_VC, best.figures_VC
        progress(cluster + 1, num_clusters, "item vectors")
    return Neighbours(items_VC, figures_VC)


def _best(asked_Q: np.ndarray, compared: np.ndarray, unit_VD: np.ndarray, num_candidates: int) -> Neighbours:
    """Return the best compared items of each query with a cosine above 0, without the query itself; ties by index."""
    cosines = unit_VD[asked_Q] @ unit_VD[compared].T
    cosines[asked_Q[:, None] == compared] = -1.0
    items_QC = np.full((len(asked_Q), num_candidates), NONE, dtype=np.int32)
    figures_QC = np.zeros((len(asked_Q), num_candidates), dtype=np.float32)
    num = min(num_candidates, len(compared))
    top = np.sort(np.argpartition(-cosines, num - 1, axis=1)[:, :num], axis=1)
    best_cosines = np.take_along_axis(cosines, top, 1)
    order = np.argsort(-best_cosines, axis=1, kind="stable")
    top, best_cosines = np.take_along_axis(top, order, 1), np.take_along_axis(best_cosines, order, 1)
    items_QC[:, :num] = np.where(best_cosines > 0, compared[top], NONE)
    figures_QC[:, :num] = np.maximum(best_cosines, 0)
    return Neighbours(items_QC, figures_QC)


def k_means(rows_SD: np.ndarray, num_clusters: int) -> "KMeans":
    """Return at most `num_clusters` clusters of these rows, fitted from random ones in a few iterations."""
    from sklearn.cluster import KMeans  # slow to import
    from sklearn.exceptions import ConvergenceWarning

    means = KMeans(min(num_clusters, len(rows_SD)), init="random", n_init=1, max_iter=_ITERATIONS, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return means.fit(rows_SD)


def distances(rows_QD: np.ndarray, centroids_GD: np.ndarray) -> np.ndarray:
    """Return squared distances (Q, G) minus each row's squared norm, which is constant per row."""
    found_QG: np.ndarray = (centroids_GD**2).sum(axis=1) - 2 * rows_QD @ centroids_GD.T
    return found_QG
