"""The student's item table of a large catalogue: int8 rows in cells of similar items, of which a ranking scores the best few. Numpy only.

    <bundle>/student_table/rows.npy       (V, D) int8, cell by cell
                           scales.npy     (V,) float32: row times scale, and its cell's centroid, are the item's embedding
                           items.npy      (V,) int32: the item of each row
                           starts.npy     (C + 1,) int64: the first row of each cell, and V
                           centroids.npy  (C, D) float32: the mean embedding of each cell
                           metric.npy     (D, D) float32: distances after this map decide an item's cell
                           search.json    how many rows a ranking scores, and the share of the exact top ten that it then finds

The arrays are mapped into memory, so the gateways of one machine share them. An item's score does not depend on which others are scored: the state is
rounded to integers so small that a float32 holds each product with a row exactly, and those with centroids are always computed together.

Shape suffixes: V items or rows, D hidden, C cells, L items of a history, R some rows.
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
_ROWS_PER_WANTED = 256
"""A longer list is looked for among more rows."""
_KINDS = {
    "rows": ("i1", 2),
    "scales": ("f4", 1),
    "items": ("i4", 1),
    "starts": ("i8", 1),
    "centroids": ("f4", 2),
    "metric": ("f4", 2),
}
"""By array: its type and its number of dimensions."""


@dataclass(frozen=True, eq=False)
class ItemTable:
    """All items' embeddings. `num_scored` is about how many allowed rows a ranking scores, `recall` what it found so of the exact top ten."""

    rows_VD: np.ndarray
    scales_V: np.ndarray
    items_V: np.ndarray
    starts_C: np.ndarray
    centroids_CD: np.ndarray
    metric_DD: np.ndarray
    num_scored: int
    recall: float

    @cached_property
    def row_of_V(self) -> np.ndarray:
        """The row of each item."""
        row_of_V = np.empty(len(self.items_V), dtype=np.int32)
        row_of_V[self.items_V] = np.arange(len(self.items_V), dtype=np.int32)
        return row_of_V

    @cached_property
    def cell_of_V(self) -> np.ndarray:
        """The cell of each row."""
        return np.repeat(np.arange(len(self.centroids_CD), dtype=np.int32), np.diff(self.starts_C))

    def embedded(self, items_L: np.ndarray) -> np.ndarray:
        """Return the embeddings (L, D) float32 of these items."""
        rows_L = self.row_of_V[items_L]
        own_LD = self.rows_VD[rows_L] * self.scales_V[rows_L, None]
        embedded_LD: np.ndarray = self.centroids_CD[self.cell_of_V[rows_L]] + own_LD
        return embedded_LD

    def score(self, state_D: np.ndarray) -> np.ndarray:
        """Return the scores (V,) of all items by item index."""
        return self._score_rows(state_D, self.centroids_CD @ state_D, self.row_of_V)

    def best(self, state_D: np.ndarray, allowed_V: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return at most `k` allowed items, best first (ties by index), and their scores; fewer only where fewer are allowed.

        Where no more than `num_scored` items are allowed, the order is exact.
        """
        num_scored, scores_C = max(self.num_scored, _ROWS_PER_WANTED * k), self.centroids_CD @ state_D
        if np.count_nonzero(allowed_V) <= num_scored:
            rows_R = self.row_of_V[np.flatnonzero(allowed_V)]
        else:
            rows_R = self._near_rows(scores_C, allowed_V, num_scored, max(1, k, num_scored // 2))
        return _top(self.items_V[rows_R], self._score_rows(state_D, scores_C, rows_R), k)

    def _near_rows(self, scores_C: np.ndarray, allowed_V: np.ndarray, num_scored: int, num_wanted: int) -> np.ndarray:
        """Return the allowed rows of the best cells: of so many that they hold `num_scored` rows and, of these, `num_wanted` allowed ones.

        At least `num_wanted` are allowed, so the cells do not end before.
        """
        cells_C = np.argsort(-scores_C)
        ends_C = np.cumsum(self.starts_C[cells_C + 1] - self.starts_C[cells_C])
        found: list[np.ndarray] = []
        num_found, first, until = 0, 0, num_scored
        while num_found < num_wanted:
            last = max(first, int(np.searchsorted(ends_C, until))) + 1
            rows_R = self._rows_of(cells_C[first:last])
            found.append(rows_R[allowed_V[self.items_V[rows_R]]])
            num_found, first, until = num_found + len(found[-1]), last, 2 * until
        return np.concatenate(found)

    def _rows_of(self, cells: np.ndarray) -> np.ndarray:
        """Return the rows of these cells, cell by cell."""
        starts, sizes = self.starts_C[cells], self.starts_C[cells + 1] - self.starts_C[cells]
        ends = np.cumsum(sizes)
        rows_R: np.ndarray = np.repeat(starts - (ends - sizes), sizes) + np.arange(ends[-1])
        return rows_R

    def _score_rows(self, state_D: np.ndarray, scores_C: np.ndarray, rows_R: np.ndarray) -> np.ndarray:
        limit = (_EXACT_BELOW - 1) // (_ROW_LIMIT * len(state_D))
        step = np.float32(np.abs(state_D).max() / limit) or np.float32(1.0)
        whole_D = np.rint(state_D / step)
        dots_R = np.empty(len(rows_R), dtype=np.float32)
        for first in range(0, len(rows_R), _CHUNK):
            chunk_RD = self.rows_VD.take(rows_R[first : first + _CHUNK], axis=0)
            np.dot(chunk_RD.astype(np.float32), whole_D, out=dots_R[first : first + _CHUNK])
        scores_R: np.ndarray = scores_C[self.cell_of_V[rows_R]] + dots_R * (self.scales_V[rows_R] * step)
        return scores_R

    def save(self, folder: Path) -> None:
        """Write the folder; one that exists is written anew."""
        folder.mkdir(exist_ok=True)
        arrays = (self.rows_VD, self.scales_V, self.items_V, self.starts_C, self.centroids_CD, self.metric_DD)
        for name, array in zip(_KINDS, arrays, strict=True):
            np.save(folder / f"{name}.npy", array)
        self.save_search(folder)

    def save_search(self, folder: Path) -> None:
        """Write how many rows a ranking scores into a folder that has the arrays."""
        (folder / _SEARCH).write_text(json.dumps({"num_scored": self.num_scored, "recall@10": self.recall}))


def load_table(folder: Path) -> ItemTable:
    """Map what `save` wrote. Raises BundleCorrupt naming the file."""
    rows_VD, scales_V, items_V, starts_C, centroids_CD, metric_DD = (_mapped(folder, name) for name in _KINDS)
    num_rows, size = rows_VD.shape
    _check(folder, "scales", len(scales_V) == num_rows)
    _check(folder, "items", len(items_V) == num_rows and _is_each_once(items_V))
    _check(folder, "centroids", centroids_CD.shape[1] == size)
    _check(folder, "metric", metric_DD.shape == (size, size))
    _check(folder, "starts", len(starts_C) == len(centroids_CD) + 1 and _are_starts(starts_C, num_rows))
    try:
        search = json.loads((folder / _SEARCH).read_text())
        num_scored, recall = int(search["num_scored"]), float(search["recall@10"])
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise BundleCorrupt(f"{folder / _SEARCH}: does not describe a search ({error})") from error
    return ItemTable(rows_VD, scales_V, items_V, starts_C, centroids_CD, metric_DD, num_scored, recall)


def quantized(own_VD: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return int8 rows and their scales (V,), whose products are nearest to these differences of embeddings from centroids."""
    scales_V = (np.abs(own_VD).max(axis=1) / _ROW_LIMIT).astype(np.float32)
    divisors_V = np.where(scales_V > 0, scales_V, 1)
    return np.rint(own_VD / divisors_V[:, None]).astype(np.int8), scales_V


def _top(items_R: np.ndarray, scores_R: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the `k` best items, ties by index, and their scores."""
    if 0 < k < len(scores_R):
        places = np.flatnonzero(scores_R >= np.partition(scores_R, len(scores_R) - k)[len(scores_R) - k])
        items_R, scores_R = items_R[places], scores_R[places]
    order = np.lexsort((items_R, -scores_R))[:k]
    return items_R[order], scores_R[order]


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
