"""The loss of disliked items: -log(1 - p(item | history before it)), their unlikelihood.

Welleck et al. 2020 (arXiv:1908.04319). Lowering an item raises all others in a softmax, so the gradient is the softmax
minus the softmax over the other items: no item's change exceeds its probability, and unlikely items barely change. The
gradient is bounded, even for a nearly certain item.

An item of several codes is one event: its probability is the product over the levels, and the loss is that of the whole
path, -log(1 - prod_l p_l). A term per level, -sum_l log(1 - p_l), would push down all items with the same first code,
although nobody dislikes most of them. Here they are hardly affected: a level's gradient contains the probability of all
other levels.

With odds_l = log(p_l / (1 - p_l)), which is the item's score minus the logsumexp of all other scores, log p_l and log(1
- p_l) are exact for all p_l. For a likely item, 1 - prod_l p_l = sum_l (1 - p_l) prod_{m<l} p_m, the probability of
leaving the path at some level, is a sum of positive terms without cancellation; below 1/2, log1p is exact.

Shape suffixes: U disliked items (C of a chunk), D hidden, V items or codes, S drawn items, X levels.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pipelines.training.batches import Loss
from pipelines.training.target.sampled import SampledItems
from pipelines.training.target.softmax import PENALTY, LeftOut, chunks

_LOG_HALF = -math.log(2)
_CERTAIN = PENALTY / 2
"""Odds above which all other items are masked out: no scores differ by this much."""


def unlikelihood(odds_UX: Tensor, weights_U: Tensor) -> Tensor:
    """Return the weighted sum of -log(1 - p), in nats, for items whose codes have these log odds.

    An item without alternatives counts 0.
    """
    stays_UX, leaves_UX = functional.logsigmoid(odds_UX), functional.logsigmoid(-odds_UX)
    log_p_U, reached_UX = stays_UX.sum(1), functional.pad(stays_UX.cumsum(1)[:, :-1], (1, 0))
    is_likely_U, is_choice_U = log_p_U > _LOG_HALF, (odds_UX < _CERTAIN).any(1)
    of_unlikely_U = torch.log1p(-log_p_U.clamp(max=_LOG_HALF).exp())
    log_rest_U = torch.where(is_likely_U, (reached_UX + leaves_UX).logsumexp(1), of_unlikely_U)
    return -(weights_U * is_choice_U * log_rest_U).sum()


def mean_of_both(of_labels: Loss, total: Tensor, number: int) -> Loss:
    """Return the mean over labels and dislikes together, and their number.

    Sums over parts and processes then weigh both alike, even if a part has no label.
    """
    mean, num_labels = of_labels
    return (mean * num_labels + total) / max(1, num_labels + number), num_labels + number


def log_odds(hidden_UD: Tensor, head_VD: Tensor, codes_U: Tensor, left_out: LeftOut | None = None) -> Tensor:
    """Return log(p / (1 - p)) (U,) of these items or codes in softmax(hidden @ head.T).

    Scores are computed one chunk at a time, and recomputed for the gradient.
    """

    def of_chunk(hidden_CD: Tensor, head_VD: Tensor, codes_C: Tensor, penalty_CV: Tensor) -> Tensor:
        scores_CV = hidden_CD @ head_VD.T
        own_C = scores_CV.gather(1, codes_C.unsqueeze(1)).squeeze(1)
        return own_C - (scores_CV + penalty_CV).logsumexp(1)

    with torch.autocast(hidden_UD.device.type, enabled=False):  # as in the labels' loss
        odds = [hidden_UD.new_zeros(0, dtype=torch.float32)]
        for rows in chunks(len(codes_U), len(head_VD)):
            hidden_CD, codes_C = hidden_UD[rows].float(), codes_U[rows]
            penalty_CV = hidden_CD.new_zeros(len(codes_C), len(head_VD)) if left_out is None else left_out.penalty(rows)
            penalty_CV.scatter_(1, codes_C.unsqueeze(1), -PENALTY)
            given = (hidden_CD, head_VD, codes_C, penalty_CV)
            odds.append(checkpoint(of_chunk, *given, use_reentrant=False, preserve_rng_state=False))
        return torch.cat(odds)


def sampled_log_odds(
    hidden_UD: Tensor, head_VD: Tensor, items_U: Tensor, sample: SampledItems, left_out: LeftOut | None = None
) -> Tensor:
    """Return the same with drawn items as alternatives, with the logQ correction (sampled.py).

    `left_out` indexes the sample's columns.
    """
    with torch.autocast(hidden_UD.device.type, enabled=False):
        hidden_UD = hidden_UD.float()
        corrected_US = (sample.items_S == items_U.unsqueeze(1)) * -PENALTY - sample.log_q_S
        if left_out is not None:
            corrected_US += left_out.penalty(slice(None))
        own_U = (hidden_UD * head_VD[items_U]).sum(1)
        return own_U - torch.addmm(corrected_US, hidden_UD, head_VD[sample.items_S].T).logsumexp(1)
