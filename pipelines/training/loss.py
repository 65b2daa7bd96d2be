"""Softmax cross-entropy over the whole catalogue that never holds all logits, forward and backward in one sweep.

Plain cross-entropy over T tokens and V items keeps several (T, V) matrices alive and spends most of its time fetching
fresh memory for them. Here logits live for one chunk of rows that stays in the processor's cache: scores, softmax and
both gradients are made from it at once. The target may be a mixture of the label and a teacher's distribution.

Shape suffixes: T tokens (C of a chunk), D hidden of the model, E hidden of the teacher, V items.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipelines.training.seen import Seen

_CHUNK_ROWS = 512
_TINY = 1e-38


@dataclass(frozen=True, slots=True)
class Teacher:
    """Whom to imitate: its hidden states for the same tokens and its output matrix.

    `weight` is the share of the teacher's distribution in the target; the label has the rest.
    """

    hidden_TE: Tensor
    head_VE: Tensor
    weight: float


def catalogue_loss(
    hidden_TD: Tensor, head_VD: Tensor, labels_T: Tensor, seen: Seen | None = None, teacher: Teacher | None = None
) -> Tensor:
    """Return the mean cross-entropy (a scalar) of softmax(hidden @ head.T) against the labels, mixed with the teacher's."""
    loss: Tensor = _FusedLoss.apply(hidden_TD, head_VD, labels_T, seen, teacher)  # type: ignore[no-untyped-call]
    return loss


class _FusedLoss(torch.autograd.Function):
    """Computes the gradients in the forward pass, while the chunk's probabilities are at hand; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, head_VD: Tensor, labels_T: Tensor, seen: Seen | None, teacher: Teacher | None
    ) -> Tensor:
        grad_hidden_TD, grad_head_VD = torch.empty_like(hidden_TD), torch.zeros_like(head_VD)
        total = hidden_TD.new_zeros(())
        for start in range(0, len(labels_T), _CHUNK_ROWS):
            rows = slice(start, start + _CHUNK_ROWS)
            penalty_CV = None if seen is None else seen.penalty(rows)
            scores_CV = _scores(hidden_TD[rows], head_VD, penalty_CV)
            taught_CV = None if teacher is None else _taught(teacher, rows, penalty_CV)
            loss, error_CV = _loss_and_error(scores_CV, labels_T[rows], taught_CV)
            total += loss
            error_CV /= len(labels_T)
            torch.mm(error_CV, head_VD, out=grad_hidden_TD[rows])
            grad_head_VD.addmm_(error_CV.T, hidden_TD[rows])
        ctx.save_for_backward(grad_hidden_TD, grad_head_VD)
        return total / len(labels_T)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None, None, None]:
        grad_hidden_TD, grad_head_VD = ctx.saved_tensors
        return grad_hidden_TD * grads[0], grad_head_VD * grads[0], None, None, None


def _scores(hidden_CD: Tensor, head_VD: Tensor, penalty_CV: Tensor | None) -> Tensor:
    scores_CV = hidden_CD @ head_VD.T
    return scores_CV if penalty_CV is None else scores_CV.add_(penalty_CV)


def _taught(teacher: Teacher, rows: slice, penalty_CV: Tensor | None) -> Tensor:
    """Return the teacher's part of the target."""
    return _scores(teacher.hidden_TE[rows], teacher.head_VE, penalty_CV).softmax(dim=1).mul_(teacher.weight)


def _loss_and_error(scores_CV: Tensor, labels_C: Tensor, taught_CV: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the chunk's summed loss and softmax minus target, which is the gradient of the scores."""
    at_label_C1 = labels_C.unsqueeze(1)
    error_CV, at_label_score_C1 = scores_CV.softmax(dim=1), scores_CV.gather(1, at_label_C1)
    log_norm_C1 = at_label_score_C1 - error_CV.gather(1, at_label_C1).clamp_min(_TINY).log()
    if taught_CV is None:
        return (log_norm_C1 - at_label_score_C1).sum(), _take(error_CV, at_label_C1, torch.ones_like(log_norm_C1))
    label_share_C1 = 1 - taught_CV.sum(dim=1, keepdim=True)
    taught = torch.dot(taught_CV.flatten(), scores_CV.flatten())
    loss = (log_norm_C1 - label_share_C1 * at_label_score_C1).sum() - taught
    return loss, _take(error_CV.sub_(taught_CV), at_label_C1, label_share_C1)


def _take(error_CV: Tensor, at_label_C1: Tensor, share_C1: Tensor) -> Tensor:
    return error_CV.scatter_add_(1, at_label_C1, -share_C1)
