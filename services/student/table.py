"""The student's item table of a large catalogue: int8 rows in cells of similar items; it scores the best cells.

    <bundle>/student_table/rows.npy       (V, D) int8, cell by cell
                           scales.npy     (V,) float32: row times scale, and its cell's centroid, are the item's
                                          embedding
                           items.npy      (V,) int32: the item of each row
                           starts.npy     (C + 1,) int64: the first row of each cell, and V
                           centroids.npy  (C, D) float32: the mean embedding of each cell
                           metric.npy     (D, D) float32: distances after this map decide an item's cell; the directions
                                          of the largest differences between states are last
                           leading.npy    (C, N) float32: the centroids after this map, in the last N directions
                           radii.npy      (C,) float32: how far the farthest row of each cell is from its centroid
                           search.json    how many rows a ranking scores, and its recall of the exact top ten

The arrays are mapped into memory, so the gateways of one machine share them. An item's score does not depend on the
other scored items: the state is rounded to integers small enough that a float32 holds each product with a row exactly,
and each product with a centroid is computed separately.

Shape suffixes: V items or rows, D hidden, C cells, N leading directions, L items of a history, R some rows.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from services.errors import BundleCorrupt

TABLE = "student_table"
_SEARCH = "search.json"
_ROW_LIMIT = 127
_EXACT_BELOW = 2**24
"""Integers of smaller size, and sums of them, are exact in float32."""
_CHUNK = 2_048
"""Rows that are converted to float32 at a time: these fit the cache."""
_CELLS_COMPARED = 4
"""Cells whose full centroid is compared, per cell needed if all cells had equal size."""
_FEW = 4
"""If at most this multiple of `num_scored` items is allowed, all are scored, which is cheaper than a search."""
_DEVIATIONS = 2.0
"""A cell's best row is assumed to exceed its centroid by this many standard deviations along a random direction."""
_LIST, _GROWTH = 20, 0.3
"""`num_scored` suits lists of this length; for longer lists it grows with this power of the length at equal recall."""
_KINDS = {
    "rows": ("i1", 2),
    "scales": ("f4", 1),
    "items": ("i4", 1),
    "starts": ("i8", 1),
    "centroids": ("f4", 2),
    "metric": ("f4", 2),
    "leading": ("f4", 2),
    "radii": ("f4", 1),
}
"""By array: its type and its number of dimensions."""


@dataclass(frozen=True, eq=False)
class ItemEmbeddings:
    """The embeddings of all items.

    `num_scored`: rows that a ranking scores, about; `recall`: of the exact top ten at that number.
    """

    rows_VD: np.ndarray
    scales_V: np.ndarray
    items_V: np.ndarray
    starts_C: np.ndarray
    centroids_CD: np.ndarray
    metric_DD: np.ndarray
    leading_CN: np.ndarray
    radii_C: np.ndarray
    num_scored: int
    recall: float

    @cached_property
    def row_of_V(self) -> np.ndarray:
        """The row of each item."""
        row_of_V = np.empty(len(self.items_V), dtype=np.int32)
        row_of_V[self.items_V] = np.arange(len(self.items_V), dtype=np.int32)
        return row_of_V

    @cached_property
    def sizes_C(self) -> np.ndarray:
        """The number of rows of each cell."""
        return np.diff(self.starts_C)

    @cached_property
    def cell_of_V(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.centroids_CD), dtype=np.int32), self.sizes_C)

    @cached_property
    def _leading_ND(self) -> np.ndarray:
        """Projects a state (D,) onto the leading directions (N,)."""
        return np.linalg.inv(self.metric_DD.astype(np.float64))[-self.leading_CN.shape[1] :].astype(np.float32)

    def embedded(self, items_L: np.ndarray) -> np.ndarray:
        """Return the embeddings (L, D) float32 of these items."""
        rows_L = self.row_of_V[items_L]
        own_LD = self.rows_VD[rows_L] * self.scales_V[rows_L, None]
        embedded_LD: np.ndarray = self.centroids_CD[self.cell_of_V[rows_L]] + own_LD
        return embedded_LD

    def score(self, state_D: np.ndarray, items: np.ndarray | None = None) -> np.ndarray:
        """Return the scores of these items, or (V,) of all items by item index."""
        return self._score_rows(state_D, self.row_of_V if items is None else self.row_of_V[items])

    def best(self, state_D: np.ndarray, allowed_V: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return at most `k` allowed items, best first (ties by index), and their scores; all if fewer are allowed.

        Where no more than four times `num_scored` items are allowed, the order is exact.
        """
        num_scored = max(k, round(self.num_scored * max(1, k / _LIST) ** _GROWTH))
        num_allowed = int(np.count_nonzero(allowed_V))
        num_hidden = len(allowed_V) - num_allowed
        num_best = k  # the best rows by score that are sure to hold the best allowed ones
        if num_allowed <= _FEW * num_scored:
            rows_R = np.sort(self.row_of_V.take(np.flatnonzero(allowed_V)))
        elif num_hidden <= (num_scored - k) // 2:
            rows_R, num_best = self._rows_of(self._best_cells(state_D, num_scored)), k + num_hidden
        else:
            rows_R = self._near_rows(state_D, allowed_V, num_scored, max(1, k, num_scored // 2))
        scores_R = self._score_rows(state_D, rows_R)
        positions = _largest(scores_R, num_best)
        items_R, scores_R = self.items_V.take(rows_R.take(positions)), scores_R.take(positions)
        is_allowed_R = allowed_V.take(items_R)
        return _top(items_R[is_allowed_R], scores_R[is_allowed_R], k)

    def _near_rows(self, state_D: np.ndarray, allowed_V: np.ndarray, num_rows: int, num_wanted: int) -> np.ndarray:
        """Return the allowed rows of the best cells, which hold at least `num_rows` rows and `num_wanted` allowed rows.

        At least `num_wanted` items are allowed, so there are enough cells.
        """
        while True:
            rows_R = self._rows_of(self._best_cells(state_D, num_rows))
            found_R: np.ndarray = rows_R[allowed_V.take(self.items_V.take(rows_R))]
            if len(found_R) >= num_wanted:
                return found_R
            num_rows = min(len(allowed_V), num_rows * (2 + num_wanted // (1 + len(found_R))))

    def _best_cells(self, state_D: np.ndarray, num_rows: int) -> np.ndarray:
        """Return the best cells that together hold `num_rows` rows, in the order of rows.

        Leading directions preselect the cells: reading all centroids takes longer than scoring the rows.
        """
        above_C = self.radii_C * np.float32(_DEVIATIONS * np.linalg.norm(state_D) / len(state_D) ** 0.5)
        leading_C = self.leading_CN @ (self._leading_ND @ state_D) + above_C
        num_cells = 1 + _CELLS_COMPARED * num_rows * len(leading_C) // len(self.items_V)
        while True:
            cells = _largest(leading_C, num_cells)
            cells = cells[np.argsort(-(self._score_cells(state_D, cells) + above_C[cells]))]
            ends = np.cumsum(self.sizes_C[cells])
            if ends[-1] >= num_rows:
                in_order: np.ndarray = np.sort(cells[: np.searchsorted(ends, num_rows) + 1])
                return in_order
            num_cells *= 2

    def _score_cells(self, state_D: np.ndarray, cells: np.ndarray) -> np.ndarray:
        """Return the scores of these cells' centroids, each computed separately."""
        scores: np.ndarray = np.vecdot(self.centroids_CD.take(cells, axis=0), state_D)
        return scores

    def _rows_of(self, cells: np.ndarray) -> np.ndarray:
        """Return the rows of these cells, cell by cell."""
        starts, sizes = self.starts_C[cells], self.sizes_C[cells]
        ends = np.cumsum(sizes)
        rows_R: np.ndarray = np.repeat(starts - (ends - sizes), sizes) + np.arange(ends[-1])
        return rows_R

    def _score_rows(self, state_D: np.ndarray, rows_R: np.ndarray) -> np.ndarray:
        limit = (_EXACT_BELOW - 1) // (_ROW_LIMIT * len(state_D))
        step = np.float32(np.abs(state_D).max() / limit) or np.float32(1.0)
        whole_D = np.rint(state_D / step)
        dots_R, chunk_RD = np.empty(len(rows_R), dtype=np.float32), np.empty((_CHUNK, len(state_D)), dtype=np.float32)
        for first in range(0, len(rows_R), _CHUNK):
            own_RD = self.rows_VD.take(rows_R[first : first + _CHUNK], axis=0)
            chunk_RD[: len(own_RD)] = own_RD
            np.dot(chunk_RD[: len(own_RD)], whole_D, out=dots_R[first : first + _CHUNK])
        cells_R, is_met_C = self.cell_of_V.take(rows_R), np.zeros(len(self.sizes_C), dtype=bool)
        is_met_C[cells_R] = True
        cells, scores_C = np.flatnonzero(is_met_C), np.empty(len(is_met_C), dtype=np.float32)
        scores_C[cells] = self._score_cells(state_D, cells)
        scores_R: np.ndarray = scores_C.take(cells_R) + dots_R * (self.scales_V.take(rows_R) * step)
        return scores_R

    def save(self, folder: Path) -> None:
        """Write the folder; one that exists is overwritten."""
        folder.mkdir(exist_ok=True)
        arrays = (
            self.rows_VD,
            self.scales_V,
            self.items_V,
            self.starts_C,
            self.centroids_CD,
            self.metric_DD,
            self.leading_CN,
            self.radii_C,
        )
        for name, array in zip(_KINDS, arrays, strict=True):
            np.save(folder / f"{name}.npy", array)
        self.save_search(folder)

    def save_search(self, folder: Path) -> None:
        """Write how many rows a ranking scores into a folder that has the arrays."""
        (folder / _SEARCH).write_text(json.dumps({"num_scored": self.num_scored, "recall@10": self.recall}))


def load_table(folder: Path) -> ItemEmbeddings:
    """Map what `save` wrote. Raises BundleCorrupt naming the file."""
    arrays = [_mapped(folder, name) for name in _KINDS]
    rows_VD, scales_V, items_V, starts_C, centroids_CD, metric_DD, leading_CN, radii_C = arrays
    num_rows, size = rows_VD.shape
    _check(folder, "scales", len(scales_V) == num_rows)
    _check(folder, "items", len(items_V) == num_rows and _is_each_once(items_V))
    _check(folder, "centroids", centroids_CD.shape[1] == size)
    _check(folder, "metric", metric_DD.shape == (size, size) and _is_invertible(metric_DD))
    _check(folder, "radii", len(radii_C) == len(centroids_CD))
    _check(folder, "leading", len(leading_CN) == len(centroids_CD) and 0 < leading_CN.shape[1] <= size)
    _check(folder, "starts", len(starts_C) == len(centroids_CD) + 1 and _are_starts(starts_C, num_rows))
    try:
        search = json.loads((folder / _SEARCH).read_text())
        num_scored, recall = int(search["num_scored"]), float(search["recall@10"])
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise BundleCorrupt(f"{folder / _SEARCH}: does not describe a search ({error})") from error
    return ItemEmbeddings(
        rows_VD, scales_V, items_V, starts_C, centroids_CD, metric_DD, leading_CN, radii_C, num_scored, recall
    )


def quantized(own_VD: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return int8 rows and scales (V,) whose products are nearest to these differences of embeddings from centroids."""
    scales_V = (np.abs(own_VD).max(axis=1) / _ROW_LIMIT).astype(np.float32)
    divisors_V = np.where(scales_V > 0, scales_V, 1)
    return np.rint(own_VD / divisors_V[:, None]).astype(np.int8), scales_V


def _top(items_R: np.ndarray, scores_R: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the `k` best items, ties by index, and their scores."""
    positions = _largest(scores_R, k)
    items_R, scores_R = items_R[positions], scores_R[positions]
    order = np.lexsort((items_R, -scores_R))[:k]
    return items_R[order], scores_R[order]


def _largest(scores: np.ndarray, num: int) -> np.ndarray:
    """Return the positions of the `num` largest scores, and of scores equal to the smallest of them."""
    if num >= len(scores):
        return np.arange(len(scores))
    position = len(scores) - max(1, num)
    return np.flatnonzero(scores >= np.partition(scores, position)[position])


def _mapped(folder: Path, name: str) -> np.ndarray:
    path, (kind, num_dimensions) = folder / f"{name}.npy", _KINDS[name]
    try:
        array = np.asarray(np.lib.format.open_memmap(path, mode="r"))
    except (OSError, ValueError) as error:
        raise BundleCorrupt(f"{path}: not an array ({error})") from error
    if array.dtype != np.dtype(kind) or array.ndim != num_dimensions:
        raise BundleCorrupt(f"{path}: holds {array.dtype} of {array.ndim} dimensions")
    return array


def _check(folder: Path, name: str, is_right: bool) -> None:
    if not is_right:
        raise BundleCorrupt(f"{folder / name}.npy: does not fit the table's other files")


def _is_each_once(items_V: np.ndarray) -> bool:
    if not len(items_V) or items_V.min() < 0 or items_V.max() >= len(items_V):
        return False
    return bool((np.bincount(items_V, minlength=len(items_V)) == 1).all())


def _are_starts(starts_C: np.ndarray, num_rows: int) -> bool:
    return bool(starts_C[0] == 0 and starts_C[-1] == num_rows and (np.diff(starts_C) >= 0).all())


def _is_invertible(metric_DD: np.ndarray) -> bool:
    return bool(np.isfinite(metric_DD).all() and np.linalg.matrix_rank(metric_DD) == len(metric_DD))
