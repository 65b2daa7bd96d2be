"""Which tokens of a row min-p, top-k and top-p keep, without sorting the vocabulary. Fixed shapes, no host sync, any device.

All three keep the beginning of one order: by score, ties by id. So each is a score at which a sum over the tokens of at least that
score reaches a target: of ones for top-k, of probabilities for top-p. The score is found digit by digit, from sums per digit.
Probabilities are summed as integers of 2^-52: their sums are exact, and the same in whatever order a device adds.

Shape suffixes: R requests, V vocabulary, H values of a digit.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from services.llm.engine.beam.top_k import ordered_bits
from services.llm.engine.forward.transfer import to_device
from services.llm.engine.text.parameters import SamplingParams

_DIGIT_BITS = (11, 11, 10)
_ONE = 2.0**52


def cut_tails(scaled_RV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return scores after the temperature with -inf for the tokens that each row's min-p, top-k and top-p leave out."""

    def column(values: list[float]) -> Tensor:
        return to_device(np.array(values, dtype=np.float64), scaled_RV.device).unsqueeze(-1)

    key_RV = ordered_bits(scaled_RV.float()) + 2**31
    mass_RV = scaled_RV.double().softmax(-1)
    peak_R1 = mass_RV.amax(-1, keepdim=True)
    is_kept_RV = mass_RV >= column([one.min_p for one in params]) * peak_R1
    if any(one.top_k for one in params):
        num_tokens = scaled_RV.shape[-1]
        count_R1 = column([one.top_k or num_tokens for one in params]).long()
        is_kept_RV &= _first(key_RV, torch.ones_like(key_RV), count_R1)
    if any(one.top_p < 1 for one in params):
        unit_RV = (mass_RV * _ONE).long().mul_(is_kept_RV)
        total_R1 = unit_RV.sum(-1, keepdim=True)
        top_p_R1 = column([one.top_p for one in params])
        target_R1 = (top_p_R1 * total_R1).ceil().long().clamp_min_(1)  # top-p of the rest may round to zero
        is_kept_RV &= _first(key_RV, unit_RV, target_R1.masked_fill_(top_p_R1 == 1, 2**62))
    return scaled_RV.masked_fill(~is_kept_RV, -torch.inf)


def _first(key_RV: Tensor, weight_RV: Tensor, target_R1: Tensor) -> Tensor:
    """Return the tokens, by key and ties by id, up to the one with which the sum of their weights reaches the target; all if none does."""
    place = sum(_DIGIT_BITS)
    found_R1, above_R1 = torch.zeros_like(target_R1), torch.zeros_like(target_R1)
    for bits in _DIGIT_BITS:
        is_inside_RV = (key_RV >> place) == found_R1
        place -= bits
        digit_RV = (key_RV >> place) & (2**bits - 1)
        sum_RH = weight_RV.new_zeros(len(key_RV), 2**bits).scatter_add_(-1, digit_RV, weight_RV * is_inside_RV)
        reach_RH = sum_RH.flip(-1).cumsum(-1).flip(-1) + above_R1
        digit_R1 = ((reach_RH >= target_R1).sum(-1, keepdim=True) - 1).clamp_min_(0)
        above_R1 = (reach_RH - sum_RH).gather(-1, digit_R1)
        found_R1 = (found_R1 << bits) | digit_R1
    is_tied_RV = key_RV == found_R1
    before_RV = above_R1 + (is_tied_RV.cumsum(-1) - 1) * weight_RV  # tied tokens have one weight
    return (key_RV > found_R1) | (is_tied_RV & (before_RV < target_R1))
