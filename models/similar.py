"""The similar items of each item, as a bundle stores them: neighbours best first, with their similarity.

Numpy only; no torch.
    <bundle>/similar/neighbours.npy   (V, N) int32: indices of the catalogue, best first; -1 for padding
                     scores.npy       (V, N) float16: from 0 to 1, descending along each row

The pipeline computes them. The arrays are mapped into memory, so the gateways of a machine share them, and a request
touches one row per named item. Shape suffixes: V items, N neighbours of an item, R neighbours of all named items
together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from models.errors import BundleCorrupt

SIMILAR = "similar"
_NEIGHBOURS, _SCORES = "neighbours.npy", "scores.npy"
_MOST, _FEWEST, _MOST_OF_ALL = 100, 32, 1 << 25
NONE = -1


def num_neighbours(num_items: int) -> int:
    """Return the maximum number of neighbours per item: 100, fewer if the catalogue's table would exceed 200 MB."""
    return max(1, min(num_items - 1, _MOST, max(_FEWEST, _MOST_OF_ALL // max(1, num_items))))


@dataclass(frozen=True, eq=False)
class SimilarTable:
    """The table of one catalogue. Thread-safe for reading."""

    neighbours_VN: np.ndarray
    scores_VN: np.ndarray

    def best(self, items: Sequence[int], allowed: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return at most `k` allowed neighbours of these items, best first (ties by index), with their scores.

        Indices (n,) and scores (n,) float64. A neighbour's score is the sum over the named items, divided by the number
        of items. `allowed` is (V,) bool.
        """
        if len(items) == 1:
            neighbours_N = self.neighbours_VN[items[0]]
            kept = np.flatnonzero(allowed[neighbours_N] & (neighbours_N != NONE))[:k]
            return neighbours_N[kept], self.scores_VN[items[0], kept].astype(np.float64)
        rows = np.array(items, dtype=np.int64)
        found_R, owner_R = np.unique(self.neighbours_VN[rows], return_inverse=True)
        sums_R = np.bincount(owner_R.ravel(), self.scores_VN[rows].ravel()) / max(1, len(items))
        kept = np.flatnonzero(allowed[found_R] & (found_R != NONE))
        order = kept[np.argsort(-sums_R[kept], kind="stable")[:k]]
        return found_R[order], sums_R[order]

    def save(self, folder: Path) -> None:
        """Write the table into this folder, which is created."""
        folder.mkdir(exist_ok=True)
        np.save(folder / _NEIGHBOURS, self.neighbours_VN)
        np.save(folder / _SCORES, self.scores_VN)


def empty_table(num_items: int) -> SimilarTable:
    """Return an empty table, for bundles from before similar items existed."""
    return SimilarTable(np.zeros((num_items, 0), dtype=np.int32), np.zeros((num_items, 0), dtype=np.float16))


def load_similar(folder: Path, num_items: int) -> SimilarTable:
    """Map the table that `save` wrote for a catalogue of this size; empty without a folder.

    Raises BundleCorrupt naming the file.
    """
    if not folder.exists():
        return empty_table(num_items)
    neighbours_VN, scores_VN = _mapped(folder / _NEIGHBOURS, "i4"), _mapped(folder / _SCORES, "f2")
    if len(neighbours_VN) != num_items or scores_VN.shape != neighbours_VN.shape:
        raise BundleCorrupt(f"{folder}: neighbours of {len(neighbours_VN)} items, the catalogue has {num_items}")
    if neighbours_VN.size and not (neighbours_VN.min() >= NONE and neighbours_VN.max() < num_items):
        raise BundleCorrupt(f"{folder / _NEIGHBOURS}: names items that the catalogue lacks")
    return SimilarTable(neighbours_VN, scores_VN)


def _mapped(path: Path, kind: str) -> np.ndarray:
    try:
        array = np.asarray(np.lib.format.open_memmap(path, mode="r"))
    except (OSError, ValueError) as error:
        raise BundleCorrupt(f"{path}: not an array ({error})") from error
    if array.dtype != np.dtype(kind) or array.ndim != 2:
        raise BundleCorrupt(f"{path}: an array of {array.dtype} with {array.ndim} dimensions")
    return array
