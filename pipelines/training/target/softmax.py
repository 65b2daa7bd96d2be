"""Softmax cross-entropy over the whole catalogue without materialising all logits, forward and backward in one pass.

Plain cross-entropy over T tokens and V items keeps several (T, V) matrices alive and spends most of its time allocating
fresh memory for them. Here logits exist for one chunk of rows that stays in the CPU cache: scores, softmax and both
gradients are computed from it at once. The target may mix the label with a teacher's distribution. Items already in a
history may be masked at each position, since serving would not show them.

Shape suffixes: B histories, L positions, T tokens (C of a chunk), D hidden of the model, E hidden of the teacher, V
items, N items in the teacher's list.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

_CHUNK_ROWS, _CHUNK_SCORES = 512, 1 << 20
"""Maximum rows of a chunk, and maximum scores in it: 4 MiB, so that chunks of a large catalogue stay in the cache
too."""
_TINY = 1e-38
PENALTY = 1e4
"""Subtracted from a masked item's score per position of distance: finite, so that 0 times it is 0."""


class LeftOut(Protocol):
    """Mask of the items excluded from each token's softmax."""

    def penalty(self, rows: slice) -> Tensor:
        """Return (C, V) for these tokens: 0, or a large negative number for excluded items."""


@dataclass(frozen=True, slots=True)
class SeenItems:
    """The items in each token's history: those whose first position in its row precedes the token's own."""

    first_place_BV: Tensor
    row_T: Tensor
    place_T: Tensor

    def penalty(self, rows: slice) -> Tensor:
        """Return (C, V) for these tokens: 0, or a large negative number for seen items.

        Arithmetic is faster than compare-and-fill.
        """
        first_CV = self.first_place_BV.index_select(0, self.row_T[rows])
        return first_CV.sub_(self.place_T[rows].unsqueeze(1)).clamp_(max=0).mul_(PENALTY)


class SoftTarget(Protocol):
    """A teacher's part of each token's target."""

    def share(self, rows: slice, penalty_CV: Tensor | None, scores_CV: Tensor) -> Tensor:
        """Return (C, V): the teacher's part of the target of these tokens, with row sums of at most 1.

        The label has the rest.
        """


@dataclass(frozen=True, slots=True)
class Teacher:
    """The model to imitate: its hidden states for the same tokens and its output matrix.

    `weight` is the weight of the teacher's distribution in the target; the label has the rest.
    """

    hidden_TE: Tensor
    head_VE: Tensor
    weight: float

    def at(self, chosen_BL: Tensor) -> "Teacher":
        """Return the teacher at these positions; its hidden states are (B, L, E)."""
        return replace(self, hidden_TE=self.hidden_TE[chosen_BL])

    def share(self, rows: slice, penalty_CV: Tensor | None, _scores_CV: Tensor) -> Tensor:
        """Return (C, V): the teacher's part of the target of these tokens."""
        scores_CV = _scores(self.hidden_TE[rows].float(), self.head_VE, penalty_CV)
        return scores_CV.softmax(dim=1).mul_(self.weight)


@dataclass(frozen=True, slots=True)
class TargetItems:
    """The items in the teacher's beams for each token, and their part of the target; rows without a search sum to 0."""

    items_TN: Tensor
    shares_TN: Tensor

    def at(self, chosen_BL: Tensor) -> "TargetItems":
        """Return the target at these positions; the lists are (B, L, N)."""
        return TargetItems(self.items_TN[chosen_BL], self.shares_TN[chosen_BL])

    def share(self, rows: slice, _penalty_CV: Tensor | None, scores_CV: Tensor) -> Tensor:
        """Return (C, V): the teacher's part of the target of these tokens."""
        shares_CN = self.shares_TN[rows]
        return torch.zeros_like(scores_CV).scatter_add_(1, self.items_TN[rows], shares_CN)


def catalogue_loss(
    hidden_TD: Tensor,
    head_VD: Tensor,
    labels_T: Tensor,
    left_out: LeftOut | None = None,
    teacher: SoftTarget | None = None,
    weights_T: Tensor | None = None,
) -> Tensor:
    """Return the weighted mean cross-entropy (a scalar) of softmax(hidden @ head.T) against labels and teacher.

    Labels are never excluded.
    """
    with torch.autocast(hidden_TD.device.type, enabled=False):  # gradients of the scores need fp32
        loss: Tensor = _FusedLoss.apply(hidden_TD.float(), head_VD, labels_T, left_out, teacher, weights_T)  # type: ignore[no-untyped-call]
    return loss


class _FusedLoss(torch.autograd.Function):
    """Computes the gradients in the forward pass from the chunk's probabilities; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        head_VD: Tensor,
        labels_T: Tensor,
        left_out: LeftOut | None,
        teacher: SoftTarget | None,
        weights_T: Tensor | None,
    ) -> Tensor:
        grad_hidden_TD, grad_head_VD = torch.empty_like(hidden_TD), torch.zeros_like(head_VD)
        total, num_labels = hidden_TD.new_zeros(()), max(1, len(labels_T))
        for rows in chunks(len(labels_T), len(head_VD)):
            penalty_CV = None if left_out is None else left_out.penalty(rows)
            scores_CV = _scores(hidden_TD[rows], head_VD, penalty_CV)
            target_CV = None if teacher is None else teacher.share(rows, penalty_CV, scores_CV)
            weights_C = None if weights_T is None else weights_T[rows]
            loss, error_CV = _loss_and_error(scores_CV, labels_T[rows], target_CV, weights_C)
            total += loss
            error_CV /= num_labels
            torch.mm(error_CV, head_VD, out=grad_hidden_TD[rows])
            grad_head_VD.addmm_(error_CV.T, hidden_TD[rows])
        ctx.save_for_backward(grad_hidden_TD, grad_head_VD)
        return total / num_labels

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None, None, None, None]:
        grad_hidden_TD, grad_head_VD = ctx.saved_tensors
        return grad_hidden_TD * grads[0], grad_head_VD * grads[0], None, None, None, None


def chunks(num_tokens: int, num_items: int) -> Iterator[slice]:
    """Yield slices of tokens whose scores over this many items fit into a chunk."""
    size = max(1, min(_CHUNK_ROWS, _CHUNK_SCORES // num_items))
    yield from (slice(start, start + size) for start in range(0, num_tokens, size))


def _scores(hidden_CD: Tensor, head_VD: Tensor, penalty_CV: Tensor | None) -> Tensor:
    scores_CV = hidden_CD @ head_VD.T
    return scores_CV if penalty_CV is None else scores_CV.add_(penalty_CV)


def _loss_and_error(
    scores_CV: Tensor, labels_C: Tensor, target_CV: Tensor | None, weights_C: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the chunk's summed loss and softmax minus target, which is the gradient of the scores."""
    at_label_C1 = labels_C.unsqueeze(1)
    error_CV, at_label_score_C1 = scores_CV.softmax(dim=1), scores_CV.gather(1, at_label_C1)
    log_norm_C1 = at_label_score_C1 - error_CV.gather(1, at_label_C1).clamp_min(_TINY).log()
    weights_C1 = None if weights_C is None else weights_C.unsqueeze(1)
    if target_CV is None:
        error_CV = _take(error_CV, at_label_C1, torch.ones_like(log_norm_C1))
        loss_C1 = log_norm_C1 - at_label_score_C1
    else:
        label_share_C1 = 1 - target_CV.sum(dim=1, keepdim=True)
        loss_C1 = log_norm_C1 - label_share_C1 * at_label_score_C1
        error_CV = _take(error_CV.sub_(target_CV), at_label_C1, label_share_C1)
    if weights_C1 is None:
        target = 0.0 if target_CV is None else torch.dot(target_CV.flatten(), scores_CV.flatten())
        return loss_C1.sum() - target, error_CV
    if target_CV is not None:
        loss_C1 = loss_C1 - (target_CV * scores_CV).sum(dim=1, keepdim=True)
    return (weights_C1 * loss_C1).sum(), error_CV.mul_(weights_C1)


def _take(error_CV: Tensor, at_label_C1: Tensor, share_C1: Tensor) -> Tensor:
    return error_CV.scatter_add_(1, at_label_C1, -share_C1)


def next_unseen(labels_BL: Tensor, is_label_BL: Tensor) -> Tensor:
    """Return the positions (B, L) bool whose label, an item index, is new to its history.

    Negative labels are skipped; labels that are not learned still count as seen. Repeats are not learned, because
    serving would never show them.
    """
    is_same_BLL = labels_BL.unsqueeze(2) == labels_BL.unsqueeze(1)
    return (labels_BL >= 0) & is_label_BL & ~is_same_BLL.tril(-1).any(2)


def seen_before(columns_BL: Tensor, chosen_BL: Tensor, num_columns: int) -> SeenItems:
    """Return the columns seen before each chosen position.

    A position's column is that of its label, negative for none.
    """
    row_T, _ = chosen_BL.nonzero(as_tuple=True)
    return SeenItems(first_places(columns_BL, num_columns), row_T, _places(columns_BL)[chosen_BL])


def first_places(labels_BL: Tensor, num_items: int) -> Tensor:
    """Return the position (B, V) at which each item is first the label, L for items that never are.

    Negative labels are skipped.
    """
    length = labels_BL.shape[1]
    places_BL = _places(labels_BL).masked_fill(labels_BL < 0, length)
    never_BV = torch.full((len(labels_BL), num_items), float(length), device=labels_BL.device)
    return never_BV.scatter_reduce(1, labels_BL.clamp(min=0), places_BL, "amin")


def _places(labels_BL: Tensor) -> Tensor:
    """Return each label's position in its row, (B, L) fp32."""
    length = labels_BL.shape[1]
    return torch.arange(length, dtype=torch.float32, device=labels_BL.device).expand_as(labels_BL)
