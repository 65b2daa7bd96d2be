"""Softmax cross-entropy over a sample of the catalogue, for catalogues whose full softmax dominates a step.

Each item is drawn independently with its own probability q. A drawn item is weighted by 1/q in the partition sum, that
is, log q is subtracted from its score (the logQ correction), so the expected sum is the sum over the whole catalogue.
The label is always in the sum, once. If every q is 1, the loss equals the full softmax.

Shape suffixes: B histories, L positions, T tokens, S drawn items, D hidden of the model, E hidden of the teacher, V
items, N items in the teacher's list.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pipelines.training.target.softmax import PENALTY, SeenItems, TargetItems, Teacher

_FLATTENING = 0.5
"""Exponent of an item's count of training events in its sampling probability."""
_ROUNDS = 20


@dataclass(frozen=True, slots=True)
class SampledItems:
    """The drawn items, ascending, and the log of each item's sampling probability."""

    items_S: Tensor
    log_q_S: Tensor

    def columns(self, items_BL: Tensor) -> Tensor:
        """Return the position of each item in the sample, -1 for items outside of it and for negative indices."""
        places_BL = torch.searchsorted(self.items_S, items_BL.contiguous())
        known_S1 = functional.pad(self.items_S, (0, 1), value=-1)  # insertion position after the last item
        return torch.where((known_S1[places_BL] == items_BL) & (items_BL >= 0), places_BL, -1)


class ItemSampler:
    """Draws samples of about `size` items with torch's CPU generator, whose state checkpoints hold."""

    def __init__(self, popularity_V: np.ndarray, size: int) -> None:
        self.rate_V = torch.from_numpy(rates(popularity_V, size)).float()

    def draw(self, device: torch.device) -> SampledItems:
        """Return a fresh sample."""
        items_S = (torch.rand(len(self.rate_V), device="cpu") < self.rate_V).nonzero().squeeze(1)
        return SampledItems(items_S.to(device), self.rate_V[items_S].log().to(device))


def rates(popularity_V: np.ndarray, size: int) -> np.ndarray:
    """Return each item's sampling probability: at most 1, larger for frequent items.

    The sum is `size`, or the number of items.
    """
    weight_V = (popularity_V + 1.0) ** _FLATTENING
    rate_V = np.zeros(len(weight_V))
    for _ in range(_ROUNDS):  # probability cut at 1 is redistributed
        is_free_V = rate_V < 1
        if not is_free_V.any():
            break
        left = min(size, len(weight_V)) - int((~is_free_V).sum())
        rate_V[is_free_V] = np.minimum(1.0, weight_V[is_free_V] * left / weight_V[is_free_V].sum())
    return rate_V


def sampled_loss(
    hidden_TD: Tensor,
    head_VD: Tensor,
    labels_T: Tensor,
    sample: SampledItems,
    seen: SeenItems | None = None,
    teacher: Teacher | TargetItems | None = None,
    weights_T: Tensor | None = None,
) -> Tensor:
    """Return the weighted mean cross-entropy (a scalar) against the labels, mixed with the teacher's distribution.

    `seen` indexes the sample's columns.
    """
    with torch.autocast(hidden_TD.device.type, enabled=False):  # differences of scores need fp32
        left_out_TS = (sample.items_S == labels_T.unsqueeze(1)) * -PENALTY - sample.log_q_S
        if seen is not None:
            left_out_TS += seen.penalty(slice(None))
        scores_TS = _scores(hidden_TD.float(), head_VD, labels_T, sample, left_out_TS)
        log_p_TS = scores_TS.log_softmax(1)
        loss_T = -log_p_TS[:, 0]
        if isinstance(teacher, TargetItems):
            log_sum_T = scores_TS[:, 0] - log_p_TS[:, 0]
            named_TN = torch.einsum("td,tnd->tn", hidden_TD.float(), head_VD[teacher.items_TN]) - log_sum_T.unsqueeze(1)
            loss_T = (1 - teacher.shares_TN.sum(1)) * loss_T - (teacher.shares_TN * named_TN).sum(1)
        elif teacher is not None:
            target_TS = _scores(teacher.hidden_TE.float(), teacher.head_VE, labels_T, sample, left_out_TS).softmax(1)
            loss_T = (1 - teacher.weight) * loss_T - teacher.weight * (target_TS * log_p_TS).sum(1)
        return (loss_T if weights_T is None else weights_T * loss_T).sum() / max(1, len(labels_T))


def _scores(hidden_TD: Tensor, head_VD: Tensor, labels_T: Tensor, sample: SampledItems, left_out_TS: Tensor) -> Tensor:
    """Return (T, 1 + S): the label's score, then the corrected scores of the drawn items."""
    own_T1 = (hidden_TD * head_VD[labels_T]).sum(1, keepdim=True)
    return torch.cat([own_T1, torch.addmm(left_out_TS, hidden_TD, head_VD[sample.items_S].T)], dim=1)
