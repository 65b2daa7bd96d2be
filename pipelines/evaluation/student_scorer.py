"""Scores histories over the whole catalogue with the student in torch: what evaluation and training ask of it."""

from collections.abc import Sequence

import numpy as np
import torch

from models.student import START, Student


class StudentScorer:
    """Batched scoring of the newest `max_items` of each history."""

    def __init__(self, student: Student) -> None:
        self._student = student

    @torch.inference_mode()
    def __call__(self, histories: Sequence[np.ndarray]) -> np.ndarray:
        """Score histories of item indices -> (B, num_items) float32 logits."""
        self._student.eval()
        newest = [history[-self._student.config.max_items :] for history in histories]
        lengths_B = torch.tensor([len(history) for history in newest])
        rows_BL = torch.full((len(newest), 1 + int(lengths_B.max())), START)
        for row, history in enumerate(newest):
            rows_BL[row, 1 : 1 + len(history)] = torch.from_numpy(history) + 1
        last_BD = self._student(rows_BL)[torch.arange(len(newest)), lengths_B]
        scores_BV: np.ndarray = (last_BD @ self._student.head_weight_VD.T).numpy()
        return scores_BV
