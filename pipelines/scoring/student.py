"""The student over padded histories in torch, as validation and evaluation score with it.

Shape suffixes: B histories, L positions, D hidden, V items.
"""

from collections.abc import Sequence

import numpy as np
import torch

from models.student import START, StudentModel
from pipelines.scoring.dense import right_padded


class StudentScorer:
    """Scores histories over the whole catalogue with the student in torch, by the newest `max_items` of each."""

    def __init__(self, student: StudentModel) -> None:
        self._student = student

    @torch.inference_mode()
    def __call__(self, histories: Sequence[np.ndarray]) -> np.ndarray:
        """Score histories of item indices -> (B, num_items) float32 logits."""
        self._student.eval()
        max_items = self._student.config.max_items
        rows = [np.concatenate(([START], history[-max_items:] + 1)) for history in histories]
        rows_BL, newest_B = right_padded(rows, START, self._student.embedding.weight.device)
        last_BD = self._student(rows_BL)[torch.arange(len(rows), device=rows_BL.device), newest_B]
        scores_BV: np.ndarray = (last_BD @ self._student.head_weight_VD.T).cpu().numpy()
        return scores_BV
