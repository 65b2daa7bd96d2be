"""The serving form of the student: a graph for small catalogues, an item table to search for large ones.

The table's cells are k-means clusters in the metric of the states: the distance of two items is their average score
difference over real histories. Both k-means and the search for an item's nearest cell work by groups of cells, because
the cost over all cells is quadratic in their number. The number of rows to score is the smallest that reaches the
wanted recall of the exact top ten. If even all int8 rows have a lower recall, the graph scores all items exactly, as
for a small catalogue.

Shape suffixes: V items, S a sample of them, D hidden, C cells, G groups of cells, N the nearest of those, Q histories.
"""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import structlog
import torch
from threadpoolctl import threadpool_limits

from models.student import MAX_SCORED_WHOLE, START, StudentModel
from pipelines.publication.student_graph import state_graph, student_graph
from pipelines.scoring.dense import right_padded
from pipelines.similarity.vectors import distances, k_means
from services.student.ranker import StudentRanker
from services.student.table import TABLE, ItemEmbeddings, load_table, quantized

log = structlog.get_logger()

GRAPH = "student.onnx"
_CELLS_PER_ROOT, _LEAST_IN_CELL = 48, 10
"""Number of cells as a multiple of the square root of the number of items, and the minimum mean number of items per
cell."""
_SAMPLES_PER_CELL = 20
_GROUPS_SEARCHED = 4
"""Number of groups searched for an item's nearest cell: finds the nearest of all in 98 of 100 cases."""
_LEAST_VARIANCE = 1e-3
"""Minimum variance of directions in which states never differ, as a fraction of the largest."""
_NUM_LEADING = 16
"""Number of leading directions that decide which cells are compared in full."""
_CHUNK = 16_384
_NUM_COMPARED = 1_000
_NUM_IN_METRIC = 2_000
_BATCH = 16
_AIM, _LEAST = 0.98, 0.97
"""Wanted recall of the exact top ten, and the minimum recall of a table."""
_MARGIN = 0.005
"""Maximum recall lost to unscored rows if even all rows miss the aim."""
_SHARES = tuple(0.005 * 1.2**step for step in range(26))
_LEAST_SCORED = 1_024


def export_student(student: StudentModel, histories: Sequence[np.ndarray], folder: Path) -> ItemEmbeddings | None:
    """Write the served student into this folder and return its table, if it has one. `histories` must be real."""
    if student.config.num_items > MAX_SCORED_WHOLE:
        table = _fit_table(student, histories[:_NUM_IN_METRIC])
        table = _search_enough(student, table, histories[:_NUM_COMPARED], folder)
        if table.recall >= _LEAST:
            table.save_search(folder / TABLE)
            return table
        shutil.rmtree(folder / TABLE)
        log.warning("student_table_refused", recall=table.recall, why="all items are scored instead")
    onnx.save(student_graph(student), folder / GRAPH)
    return None


def export_with_items_added(student: StudentModel, live: Path, folder: Path) -> None:
    """Write the student with more items in the live bundle's form.

    New items join existing cells, and as many rows are scored as before.
    """
    if not (live / TABLE).exists():
        onnx.save(student_graph(student), folder / GRAPH)
        return
    before = load_table(live / TABLE)
    table = laid_out(_rows_of(student), before.metric_DD, before.centroids_CD)
    onnx.save(state_graph(student), folder / GRAPH)
    replace(table, num_scored=before.num_scored, recall=before.recall).save(folder / TABLE)


def exact_top(student: StudentModel, histories: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the ten best unseen items of each history by the trained weights."""
    tops = []
    with torch.inference_mode():
        for first in range(0, len(histories), _BATCH):
            batch = histories[first : first + _BATCH]
            scores_QV = _states(student, batch) @ student.head_weight_VD.T
            for history, scores_V in zip(batch, scores_QV, strict=True):
                scores_V[history] = -torch.inf
                tops.append(scores_V.topk(min(10, len(scores_V))).indices.numpy())
    return tops


def recall(ranked: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> float:
    """Return the mean recall of the wanted items in the ranked ones over histories."""
    return float(np.mean([np.isin(top, ranking).mean() for top, ranking in zip(wanted, ranked, strict=True)]))


def _fit_table(student: StudentModel, histories: Sequence[np.ndarray]) -> ItemEmbeddings:
    with torch.inference_mode():
        batches = [histories[first : first + _BATCH] for first in range(0, len(histories), _BATCH)]
        states_QD = torch.cat([_states(student, batch) for batch in batches]).numpy()
    metric_DD, rows_VD = _metric(states_QD), _rows_of(student)
    num_cells = max(1, min(len(rows_VD) // _LEAST_IN_CELL, round(_CELLS_PER_ROOT * len(rows_VD) ** 0.5)))
    num_samples = min(len(rows_VD), num_cells * _SAMPLES_PER_CELL)
    sample = np.random.default_rng(0).choice(len(rows_VD), num_samples, replace=False)
    with threadpool_limits(1):  # same summation order everywhere
        centroids_CD = _means(rows_VD[sample], _cells_of(rows_VD[sample] @ metric_DD, num_cells))
        centroids_CD = _means(rows_VD, _nearest_cells(rows_VD @ metric_DD, centroids_CD @ metric_DD))
    return laid_out(rows_VD, metric_DD, centroids_CD)


def _cells_of(near_SD: np.ndarray, num_cells: int) -> np.ndarray:
    """Return the cell (S,) of each of these rows, about `num_cells` in all: each group of rows gets its proportion."""
    cells_S, num_made = np.empty(len(near_SD), dtype=np.int64), 0
    for group in _members(k_means(near_SD, round(num_cells**0.5)).labels_):
        share = max(1, round(num_cells * len(group) / len(near_SD)))
        cells_S[group] = num_made + k_means(near_SD[group], share).labels_
        num_made += share
    return cells_S


def _members(clusters_S: np.ndarray) -> list[np.ndarray]:
    """Return the rows of each non-empty cluster, in the order of clusters."""
    order = np.argsort(clusters_S, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(clusters_S[order])) + 1)


def _metric(states_QD: np.ndarray) -> np.ndarray:
    """Return the map (D, D) after which two items' squared distance is the mean square of their score difference."""
    variances_D, directions_DD = np.linalg.eigh(states_QD.T.astype(np.float64) @ states_QD / len(states_QD))
    variances_D = np.maximum(variances_D, _LEAST_VARIANCE * variances_D.max())
    metric_DD: np.ndarray = (directions_DD * np.sqrt(variances_D)).astype(np.float32)
    return metric_DD


def laid_out(rows_VD: np.ndarray, metric_DD: np.ndarray, centroids_CD: np.ndarray) -> ItemEmbeddings:
    """Put each item into its nearest cell. The table scores all rows until the sufficient number is known."""
    with threadpool_limits(1):
        cells = _nearest_cells(rows_VD @ metric_DD, centroids_CD @ metric_DD)
    items_V = np.argsort(cells, kind="stable").astype(np.int32)
    sizes_C = np.bincount(cells)
    sizes_C = sizes_C[sizes_C > 0]
    starts_C, means_CD = np.concatenate(([0], np.cumsum(sizes_C))), _means(rows_VD, cells)
    own_VD = rows_VD[items_V] - np.repeat(means_CD, sizes_C, axis=0)
    int8_VD, scales_V = quantized(own_VD)
    return ItemEmbeddings(
        int8_VD,
        scales_V,
        items_V,
        starts_C,
        means_CD,
        metric_DD,
        leading_CN=np.ascontiguousarray((means_CD @ metric_DD)[:, -_NUM_LEADING:]),
        radii_C=np.sqrt(np.maximum.reduceat(np.vecdot(own_VD, own_VD), starts_C[:-1])),
        num_scored=len(rows_VD),
        recall=0.0,
    )


def _nearest_cells(near_VD: np.ndarray, near_CD: np.ndarray) -> np.ndarray:
    """Return the cell (V,) with the nearest centroid to each row, searched in the nearest groups of cells."""
    groups_C = k_means(near_CD, round(len(near_CD) ** 0.5)).labels_
    groups_VN = _nearest_groups(near_VD, _means(near_CD, groups_C))
    cells_V, least_V = np.zeros(len(near_VD), dtype=np.int64), np.full(len(near_VD), np.inf, dtype=np.float32)
    for number, group in enumerate(_members(groups_C)):
        rows = np.flatnonzero((groups_VN == number).any(axis=1))
        apart = distances(near_VD[rows], near_CD[group])
        nearest = apart.argmin(axis=1)
        least = apart[np.arange(len(rows)), nearest]
        is_nearer = least < least_V[rows]
        cells_V[rows[is_nearer]] = group[nearest[is_nearer]]
        least_V[rows[is_nearer]] = least[is_nearer]
    return cells_V


def _nearest_groups(near_VD: np.ndarray, means_GD: np.ndarray) -> np.ndarray:
    """Return the groups (V, N) with the nearest means."""
    num = min(_GROUPS_SEARCHED, len(means_GD))
    chunks = (distances(near_VD[first : first + _CHUNK], means_GD) for first in range(0, len(near_VD), _CHUNK))
    return np.concatenate([chunk.argpartition(num - 1, axis=1)[:, :num].astype(np.int32) for chunk in chunks])


def _means(rows_VD: np.ndarray, cells: np.ndarray) -> np.ndarray:
    """Return the mean row of each non-empty cell, in the order of cells."""
    order = np.argsort(cells, kind="stable")
    _, starts, sizes = np.unique(cells[order], return_index=True, return_counts=True)
    means_CD: np.ndarray = np.add.reduceat(rows_VD[order], starts) / sizes[:, None].astype(np.float32)
    return means_CD


def _search_enough(
    student: StudentModel, table: ItemEmbeddings, histories: Sequence[np.ndarray], folder: Path
) -> ItemEmbeddings:
    """Write graph and arrays; return the table with the fewest scored rows that reach the recall, otherwise all."""
    onnx.save(state_graph(student), folder / GRAPH)
    table.save(folder / TABLE)
    ranker, wanted = StudentRanker(folder / GRAPH), exact_top(student, histories)
    states = [ranker.state(history.tolist()) for history in histories]
    tried = []
    for share in _SHARES:
        num_scored = min(len(table.items_V), max(_LEAST_SCORED, round(share * len(table.items_V))))
        tried.append(_found(table, states, histories, wanted, num_scored))
        if tried[-1].recall >= _AIM:
            return tried[-1]
    table = _found(table, states, histories, wanted, len(table.items_V))
    enough = max(_LEAST, table.recall - _MARGIN)
    return next((trial for trial in tried if trial.recall >= enough), table)


def _found(
    table: ItemEmbeddings,
    states: Sequence[np.ndarray],
    histories: Sequence[np.ndarray],
    wanted: Sequence[np.ndarray],
    num_scored: int,
) -> ItemEmbeddings:
    """Return the table with this number of scored rows, and its recall."""
    table = replace(table, num_scored=num_scored)
    ranked = [
        table.best(state, _unseen(history, len(table.items_V)), 10)[0]
        for state, history in zip(states, histories, strict=True)
    ]
    return replace(table, recall=recall(ranked, wanted))


def _unseen(history: np.ndarray, num_items: int) -> np.ndarray:
    mask = np.ones(num_items, dtype=bool)
    mask[history] = False
    return mask


def _states(student: StudentModel, histories: Sequence[np.ndarray]) -> torch.Tensor:
    rows = [np.concatenate(([START], history[-student.config.max_items :] + 1)) for history in histories]
    rows_QL, newest_Q = right_padded(rows, START, torch.device("cpu"))
    states_QD: torch.Tensor = student(rows_QL)[torch.arange(len(rows)), newest_Q]
    return states_QD


def _rows_of(student: StudentModel) -> np.ndarray:
    rows_VD: np.ndarray = student.head_weight_VD.detach().numpy()
    return rows_VD
