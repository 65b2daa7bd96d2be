"""Which tokens of a row min-p, top-k and top-p keep, without sorting the vocabulary. Fixed shapes, no host sync, any device.

All three keep the beginning of one order: by score, ties by id. Rows with a top-k are cut among their best k tokens. Elsewhere top-p is
the score at which the probabilities of the tokens of at least that score reach a target; it is found digit by digit, from one sum
for each value of a digit. Probabilities are summed as integers of 2^-52: their sums are exact, and the same in whatever order a
device adds.

Shape suffixes: R requests, V vocabulary, N tokens in question of each request, H values of a digit.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from services.llm.engine.beam.top_k import ordered_bits, top_by_score
from services.llm.engine.forward.transfer import to_device
from services.llm.engine.text.parameters import SamplingParams

_DIGIT_BITS = (11, 11, 10)
_ONE = 2.0**52


def cut_tails(scaled_RV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return scores after the temperature with -inf for the tokens that each row's min-p, top-k and top-p leave out."""
    num_tokens = scaled_RV.shape[-1]
    among_few = [row for row, one in enumerate(params) if 0 < one.top_k < num_tokens]
    among_all = [
        row for row, one in enumerate(params) if not 0 < one.top_k < num_tokens and (one.min_p or one.top_p < 1)
    ]
    for rows, cut in ((among_few, _cut_among_few), (among_all, _cut_among_all)):
        if rows:
            row_R = to_device(np.array(rows), scaled_RV.device)
            scaled_RV = scaled_RV.index_copy(0, row_R, cut(scaled_RV[row_R], [params[row] for row in rows]))
    return scaled_RV


def _cut_among_few(scaled_RV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Cut rows that all have a top-k: among the tokens of the largest, best first."""
    id_V = torch.arange(scaled_RV.shape[-1], device=scaled_RV.device)
    id_RN = top_by_score(scaled_RV.float(), id_V, max(one.top_k for one in params))
    is_few_RN = id_V[: id_RN.shape[-1]] < _column([one.top_k for one in params], scaled_RV)
    mass_RN = scaled_RV.double().softmax(-1).gather(-1, id_RN)
    scaled_RN = scaled_RV.gather(-1, id_RN)
    is_kept_RN = is_few_RN & _are_kept(scaled_RN, mass_RN.masked_fill(~is_few_RN, 0.0), params)
    kept_RN = scaled_RN.masked_fill(~is_kept_RN, -torch.inf)
    return torch.full_like(scaled_RV, -torch.inf).scatter(-1, id_RN, kept_RN)


def _cut_among_all(scaled_RV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    return scaled_RV.masked_fill(~_are_kept(scaled_RV, scaled_RV.double().softmax(-1), params), -torch.inf)


def _are_kept(scaled_RN: Tensor, mass_RN: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return which tokens min-p and then top-p keep. Tokens of one score are in the order of their ids."""
    is_kept_RN = mass_RN >= _column([one.min_p for one in params], mass_RN) * mass_RN.amax(-1, keepdim=True)
    if all(one.top_p == 1 for one in params):
        return is_kept_RN
    unit_RN = (mass_RN * _ONE).long().mul_(is_kept_RN)
    top_p_R1 = _column([one.top_p for one in params], mass_RN)
    target_R1 = (top_p_R1 * unit_RN.sum(-1, keepdim=True)).ceil().long().clamp_min_(1)  # it may round to zero
    key_RN = ordered_bits(scaled_RN.float()) + 2**31
    return is_kept_RN & _first(key_RN, unit_RN, target_R1.masked_fill_(top_p_R1 == 1, 2**62))


def _first(key_RN: Tensor, weight_RN: Tensor, target_R1: Tensor) -> Tensor:
    """Return the tokens, by key and then by place, up to the one with which the sum of weights reaches the target; all if none does."""
    place = sum(_DIGIT_BITS)
    found_R1, above_R1 = torch.zeros_like(target_R1), torch.zeros_like(target_R1)
    for bits in _DIGIT_BITS:
        is_inside_RN = (key_RN >> place) == found_R1
        place -= bits
        digit_RN = (key_RN >> place) & (2**bits - 1)
        sum_RH = weight_RN.new_zeros(len(key_RN), 2**bits).scatter_add_(-1, digit_RN, weight_RN * is_inside_RN)
        reach_RH = sum_RH.flip(-1).cumsum(-1).flip(-1) + above_R1
        digit_R1 = ((reach_RH >= target_R1).sum(-1, keepdim=True) - 1).clamp_min_(0)
        above_R1 = (reach_RH - sum_RH).gather(-1, digit_R1)
        found_R1 = (found_R1 << bits) | digit_R1
    is_tied_RN = key_RN == found_R1
    before_RN = above_R1 + (is_tied_RN.cumsum(-1) - 1) * weight_RN  # tied tokens have one weight
    return (key_RN > found_R1) | (is_tied_RN & (before_RN < target_R1))


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return to_device(np.array(values, dtype=np.float64), like.device).unsqueeze(-1)
