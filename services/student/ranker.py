"""Ranks the whole catalogue for one history with the distilled student, on ONNX Runtime alone: no torch.

It runs in the gateway's process, in well under a millisecond, and its runtime releases the interpreter lock. It works on
item indices, and does not know users, bundles or deadlines.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from models.catalogue import Catalogue
from models.registry import Bundle
from services.errors import BundleCorrupt
from services.settings.settings import environment_kept

START_ROW = 0
"""The model's input row for the beginning of a history; item i is row i + 1."""
_BLOCK = 1_024
"""Items of one block, of which there are at least four for each item wanted."""


class StudentRanker:
    """One loaded student. Safe to call from several threads."""

    def __init__(self, path: Path, num_threads: int = 1) -> None:
        """Load the model. Raises BundleCorrupt when the file is not one."""
        with environment_kept(
            ORT_DISABLE_TELEMETRY="1"
        ):  # else, since 1.29, it reports each session and model to its maker
            import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            self._max_items = int(self._session.get_modelmeta().custom_metadata_map["max_items"])
        except Exception as error:  # ONNX Runtime's exceptions share no base but this
            raise BundleCorrupt(f"{path}: not a student ({error})") from error

    def rank(self, history: Sequence[int], allowed: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return at most `k` allowed item indices, best first (ties by index), and their scores (logits).

        `history` holds item indices, oldest first; only the newest `max_items` count, and an empty one ranks the items that
        most histories begin with. `allowed` is (num_items,) bool; where it leaves fewer than `k`, fewer come back.
        """
        scores_V = self.score(history)
        allowed_V = np.where(allowed, scores_V, -np.inf)
        candidates = np.flatnonzero((allowed_V >= _floor(allowed_V, k)) & allowed)
        best = candidates[np.argsort(-scores_V[candidates], kind="stable")[:k]]
        return best, scores_V[best]

    def score(self, history: Sequence[int]) -> np.ndarray:
        """Return the logits (num_items,) float32 of all items, by item index."""
        newest = np.asarray(history[-self._max_items :], dtype=np.int64)
        rows = np.concatenate(([START_ROW], newest + 1))
        scores_V: np.ndarray = self._session.run(None, {"rows": rows})[0]
        return scores_V


def _floor(scores_V: np.ndarray, k: int) -> float:
    """Return a score that at least `k` items reach, and few more; all are reached where there are no more.

    The k-th best of the maxima of equal blocks is one, and costs a pass over the scores instead of a partition of them. All items at or above
    it are candidates, so ties at the edge are decided by index.
    """
    block = min(_BLOCK, len(scores_V) // (4 * k)) if k else 0
    if block < 2:
        return -np.inf
    whole = len(scores_V) // block * block
    maxima = scores_V[:whole].reshape(-1, block).max(axis=1)
    return float(np.partition(maxima, len(maxima) - k)[len(maxima) - k])


def load_student(bundle: Bundle, catalogue: Catalogue) -> StudentRanker:
    """Load the bundle's student and check that it ranks the bundle's catalogue. Raises BundleCorrupt."""
    ranker = StudentRanker(bundle.student_path)
    num_scored, num_items = len(ranker.score([])), len(catalogue.item_ids)
    if num_scored != num_items:
        raise BundleCorrupt(f"{bundle.path}: the student scores {num_scored} items, the catalogue has {num_items}")
    return ranker
