"""Ranks the catalogue for one history with the distilled student, on ONNX Runtime and numpy: no torch.

It runs in the gateway's process in about a millisecond, and its runtime releases the interpreter lock. It works on item
indices, and does not know users, bundles or deadlines. For a small catalogue the graph scores all items exactly. For a
large catalogue the graph returns the history's state, and a table (table.py) finds the best items for that state.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from models.catalogue import Catalogue
from models.mixer import NUM_NORMALISED, Added, floor_of
from models.registry.bundle import Bundle
from services.errors import BundleCorrupt
from services.settings.settings import environment_kept
from services.student.table import TABLE, load_table

START_ROW = 0
"""The model's input row for the beginning of a history; item i is row i + 1."""
_EMBEDDING = "embedding.weight"
"""The tensor of the input rows, which are the output rows too."""
_NOTHING = np.zeros(0, dtype=np.int64)
_FORMS = {"rows", "embedded"}
"""Inputs of a graph: row indices of its own embedding, or the history's embeddings from the table."""


class StudentRanker:
    """One loaded student. Safe to call from several threads."""

    def __init__(self, path: Path) -> None:
        """Load the model, and the table in the same folder if it is of that form.

        Raises BundleCorrupt naming the file that is not one.
        """
        with environment_kept(ORT_DISABLE_TELEMETRY="1"):  # on since 1.29: reports of each session to its maker
            import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            self._max_items = int(self._session.get_modelmeta().custom_metadata_map["max_items"])
            (taken,) = self._session.get_inputs()
        except Exception as error:  # ONNX Runtime's exceptions share no base but this
            raise BundleCorrupt(f"{path}: not a student model ({error})") from error
        if taken.name not in _FORMS:
            raise BundleCorrupt(f"{path}: a student that takes {taken.name!r}")
        self._vectors_VD: np.ndarray | None = None
        self._table = load_table(path.parent / TABLE) if taken.name == "embedded" else None
        if self._table is not None and self._table.rows_VD.shape[1] != taken.shape[1]:
            raise BundleCorrupt(f"{path.parent / TABLE}/rows.npy: not the embeddings of {path.name}")

    def rank(
        self, history: Sequence[int], allowed: np.ndarray, k: int, added: Added | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return at most `k` allowed item indices, best first (ties by index), and their scores.

        Scores are logits, or the mixer's logarithms if `added` holds the scores of other sources.
        `history` holds item indices, oldest first; only the newest `max_items` count, and an empty one ranks the items
        that most histories begin with. `allowed` is (num_items,) bool; where it leaves fewer than `k`, fewer come back.
        With a table most of the best are found, and these in the order of their scores.
        """
        if added is not None:
            return self._mixed(history, allowed, k, added)
        if self._table is not None:
            return self._table.best(self.state(history), allowed, k)
        scores_V = self.score(history)
        allowed_V = np.where(allowed, scores_V, -np.inf)
        candidates = np.flatnonzero((allowed_V >= floor_of(allowed_V, k)) & allowed)
        best = candidates[np.argsort(-scores_V[candidates], kind="stable")[:k]]
        return best, scores_V[best]

    def _mixed(
        self, history: Sequence[int], allowed: np.ndarray, k: int, added: Added
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rank by the mix. With a table, only the student's best items and the items of the sources are scored."""
        if not added.model_weight:
            return added.best_ranked(_NOTHING, _NOTHING, allowed, k)
        if self._table is None:
            return added.best(self.score(history), allowed, k)
        state_D = self.state(history)
        ranked, logits = self._table.best(state_D, allowed, max(k, NUM_NORMALISED))
        named = np.setdiff1d(added.items[allowed[added.items]], ranked)
        scored = np.concatenate([logits, self._table.score(state_D, named)])
        logs = scored - np.logaddexp.reduce(logits[:NUM_NORMALISED])
        return added.best_ranked(np.concatenate([ranked, named]), logs, allowed, k)

    def read_vectors(self, path: Path) -> None:
        """Read the items' vectors from a file of the weights; a student with a table has them there.

        Raises BundleCorrupt.
        """
        if self._table is None:
            try:
                embedding_VD = load_file(path)[_EMBEDDING][START_ROW + 1 :]
            except (OSError, KeyError, SafetensorError) as error:
                raise BundleCorrupt(f"{path}: not the weights of a student ({error})") from error
            self._vectors_VD = _unit(embedding_VD.astype(np.float32))

    def vectors(self, items: np.ndarray) -> np.ndarray | None:
        """Return the unit vectors (n, D) float32 of these items (n,); None where none were read."""
        if self._table is not None:
            return _unit(self._table.embedded(items))
        return None if self._vectors_VD is None else self._vectors_VD.take(items, axis=0)

    def score(self, history: Sequence[int]) -> np.ndarray:
        """Return the logits (num_items,) float32 of all items, by item index."""
        if self._table is not None:
            return self._table.score(self.state(history))
        rows = np.array([START_ROW, *(item + 1 for item in history[-self._max_items :])], dtype=np.int64)
        scores_V: np.ndarray = self._session.run(None, {"rows": rows})[0]
        return scores_V

    def state(self, history: Sequence[int]) -> np.ndarray:
        """Return the state (D,) float32 that items are scored against. Only of a student with a table."""
        assert self._table is not None, "this graph scores items itself"
        embedded_LD = self._table.embedded(self._newest(history))
        state_D: np.ndarray = self._session.run(None, {"embedded": embedded_LD})[0]
        return state_D

    def _newest(self, history: Sequence[int]) -> np.ndarray:
        return np.asarray(history[-self._max_items :], dtype=np.int64)


def _unit(rows_ND: np.ndarray) -> np.ndarray:
    """Return the rows at length 1; rows of length 0 stay."""
    lengths_N1 = np.linalg.norm(rows_ND, axis=1, keepdims=True)
    unit_ND: np.ndarray = rows_ND / np.where(lengths_N1 > 0, lengths_N1, 1)
    return unit_ND


def load_student(bundle: Bundle, catalogue: Catalogue) -> StudentRanker:
    """Load the bundle's student and check that it ranks the bundle's catalogue. Raises BundleCorrupt."""
    ranker = StudentRanker(bundle.student_path)
    num_scored, num_items = len(ranker.score([])), len(catalogue.item_ids)
    if num_scored != num_items:
        raise BundleCorrupt(f"{bundle.path}: the student scores {num_scored} items, the catalogue has {num_items}")
    if bundle.student_weights_path is not None:
        ranker.read_vectors(bundle.student_weights_path)
    return ranker
