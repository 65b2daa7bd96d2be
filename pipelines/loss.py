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

_CHUNK_ROWS = 512


@dataclass(frozen=True, slots=True)
class Teacher:
    """Whom to imitate: its hidden states for the same tokens and its output matrix.

    `weight` is the share of the teacher's distribution in the target; the label has the rest.
    """

    hidden_TE: Tensor
    head_VE: Tensor
    weight: float


def catalogue_loss(hidden_TD: Tensor, head_VD: Tensor, labels_T: Tensor, teacher: Teacher | None = None) -> Tensor:
    """Give the mean cross-entropy (a scalar) of softmax(hidden @ head.T) against the labels, mixed with the teacher's."""
    loss: Tensor = _FusedLoss.apply(hidden_TD, head_VD, labels_T, teacher)  # type: ignore[no-untyped-call]
    return loss


class _FusedLoss(torch.autograd.Function):
    """Computes the gradients in the forward pass, while the chunk's probabilities are at hand; backward only scales them."""

    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, head_VD: Tensor, labels_T: Tensor, teacher: Teacher | None) -> Tensor:
        grad_hidden_TD, grad_head_VD = torch.empty_like(hidden_TD), torch.zeros_like(head_VD)
        total = hidden_TD.new_zeros(())
        for start in range(0, len(labels_T), _CHUNK_ROWS):
            rows = slice(start, start + _CHUNK_ROWS)
            scores_CV = hidden_TD[rows] @ head_VD.T
            loss, error_CV = _loss_and_error(scores_CV, labels_T[rows], teacher, rows)
            total += loss
            error_CV /= len(labels_T)
            torch.mm(error_CV, head_VD, out=grad_hidden_TD[rows])
            grad_head_VD.addmm_(error_CV.T, hidden_TD[rows])
        ctx.save_for_backward(grad_hidden_TD, grad_head_VD)
        return total / len(labels_T)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None, None]:
        grad_hidden_TD, grad_head_VD = ctx.saved_tensors
        return grad_hidden_TD * grads[0], grad_head_VD * grads[0], None, None


def _loss_and_error(scores_CV: Tensor, labels_C: Tensor, teacher: Teacher | None, rows: slice) -> tuple[Tensor, Tensor]:
    """Give the chunk's summed loss and softmax minus target, which is the gradient of the scores."""
    label_share = 1.0 if teacher is None else 1.0 - teacher.weight
    log_norm_C = scores_CV.logsumexp(dim=1)
    at_label_C1 = labels_C.unsqueeze(1)
    loss = log_norm_C.sum() - label_share * scores_CV.gather(1, at_label_C1).sum()
    if teacher is None:
        error_CV = scores_CV.sub_(log_norm_C.unsqueeze(1)).exp_()
    else:
        taught_CV = (teacher.hidden_TE[rows] @ teacher.head_VE.T).softmax(dim=1).mul_(teacher.weight)
        loss -= (taught_CV * scores_CV).sum()
        error_CV = scores_CV.sub_(log_norm_C.unsqueeze(1)).exp_().sub_(taught_CV)
    return loss, error_CV.scatter_add_(
        1, at_label_C1, torch.full_like(at_label_C1, -label_share, dtype=scores_CV.dtype)
    )
