"""Tables of related items over a catalogue with more items: old items keep their neighbours."""

import numpy as np

from models.similar import NONE, SimilarTable
from pipelines.similarity.co_visits import Neighbours


def extended(
    old: SimilarTable, places: np.ndarray, num_items: int, new: Neighbours | None = None, *, both_ways: bool = False
) -> SimilarTable:
    """Return the table over the larger catalogue.

    Args:
        old: The table of the smaller catalogue.
        places: Each old item's index in the larger catalogue.
        num_items: Size of the larger catalogue.
        new: The neighbours of the items without a place, ascending; None: they have none.
        both_ways: Whether new items also join the rows of their old neighbours, by their figure.
    """
    added = np.setdiff1d(np.arange(num_items), places)
    num = max(old.neighbours_VN.shape[1], 0 if new is None else new.items_VC.shape[1])
    neighbours_VN = np.full((num_items, num), NONE, dtype=np.int32)
    scores_VN = np.zeros((num_items, num), dtype=np.float16)
    width = old.neighbours_VN.shape[1]
    neighbours_VN[places, :width] = np.where(old.neighbours_VN == NONE, NONE, places[old.neighbours_VN])
    scores_VN[places, :width] = old.scores_VN
    if new is not None:
        neighbours_VN[added, : new.items_VC.shape[1]] = new.items_VC
        scores_VN[added, : new.items_VC.shape[1]] = new.figures_VC
        if both_ways:
            _join_rows(neighbours_VN, scores_VN, added)
    return SimilarTable(neighbours_VN, scores_VN)


def _join_rows(neighbours_VN: np.ndarray, scores_VN: np.ndarray, added: np.ndarray) -> None:
    """Add new items to the rows of their old neighbours; each row keeps its best."""
    is_new = np.zeros(len(neighbours_VN), dtype=bool)
    is_new[added] = True
    owners = np.repeat(added, neighbours_VN.shape[1])
    others, scores = neighbours_VN[added].ravel(), scores_VN[added].ravel()
    kept = (others != NONE) & ~is_new[others]
    order = np.flatnonzero(kept)[np.argsort(others[kept], kind="stable")]
    joined, starts = np.unique(others[order], return_index=True)
    parts = zip(joined, np.split(owners[order], starts[1:]), np.split(scores[order], starts[1:]), strict=False)
    for item, new_owners, new_scores in parts:
        items = np.concatenate([neighbours_VN[item], new_owners])
        figures = np.concatenate([scores_VN[item], new_scores])
        best = np.argsort(-figures, kind="stable")[: neighbours_VN.shape[1]]
        neighbours_VN[item], scores_VN[item] = items[best], figures[best]
