"""Sampling: the next tokens of a batch of text requests.

In this order: penalties, biases and the token mask on the logits; temperature; min-p and top-k; top-p on the remaining
tokens; then the draw by inverse transform. A draw depends on the logits, the request's seed and the position, never on
the batch. Returned logprobs are the model's own, before any of these steps. Min-p is from Nguyen et al. 2024, the
repetition penalty from Keskar et al. 2019.

Shape suffixes: R requests, V vocabulary, N most probable tokens (or tokens in question), S distinct tokens of one
request, H values of a digit.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.llm.engine.beam.top_k import ordered_bits, top_by_score
from services.llm.engine.device import HostCopy, to_device
from services.llm.engine.sampling_parameters import SampledToken, SamplingParams
from services.llm.engine.sequence import Sequence, TextWork

_LARGEST_LOGIT = 1e30
"""Bound of a logit after penalties and biases: divided by the smallest temperature it is still finite in fp32."""
_SMALLEST_TEMPERATURE = 1e-6
_DIGIT_BITS = (11, 11, 10)
"""Digits of a score's 32 ordered bits, most significant first."""
_ONE = 2.0**52
"""A probability of 1, as a fixed-point integer."""


@dataclass(frozen=True, slots=True)
class SamplingInput:
    """One row to sample: the parameters, all known tokens, the number of prompt tokens, and the mask's bits.

    `allowed` (ceil(V / 32),) int32 comes from a `TokenMask`; None allows every token. `num_pending` tokens after the
    known tokens are only on the device: 0 if penalties or a mask need them.
    """

    sampling: SamplingParams
    tokens: Many[int]
    num_prompt_tokens: int
    allowed: np.ndarray | None = None
    num_pending: int = 0

    @property
    def changes_logits(self) -> bool:
        """Whether a mask, penalties or biases change the logits before the temperature."""
        return self.allowed is not None or self.sampling.changes_logits

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the argmax of the unchanged logits is the result."""
        return not (self.changes_logits or self.sampling.temperature) and self.sampling.num_logprobs is None

    @classmethod
    def of(cls, sequence: Sequence) -> "SamplingInput":
        """Return the input for a text's next token."""
        work = TextWork.of(sequence)
        allowed = work.mask.allowed() if work.mask is not None else None
        return cls(work.sampling, sequence.tokens, sequence.num_prompt_tokens, allowed, sequence.num_pending)

    @classmethod
    def rows_of(cls, sequence: Sequence) -> "list[SamplingInput]":
        """Return the inputs for the tokens after a text's last token and after each of its drafts."""
        if not sequence.drafts:
            return [cls.of(sequence)]
        work, drafts = TextWork.of(sequence), sequence.drafts
        masks = sequence.draft_masks or (None,) * (len(drafts) + 1)
        return [
            cls(work.sampling, [*sequence.tokens, *drafts[:index]], sequence.num_prompt_tokens, masks[index])
            for index in range(len(drafts) + 1)
        ]


class SampledBatch:
    """The sampled tokens of some rows and their logprobs, while they are copied to the host."""

    def __init__(self, token_R: Tensor, logits_RV: Tensor, num_logprobs: Many[int | None]) -> None:
        self.token_R = token_R
        self._num_logprobs = num_logprobs
        self._has_logprobs = any(count is not None for count in num_logprobs)
        most = max(count or 0 for count in num_logprobs)
        logprobs = _logprobs(logits_RV, token_R, most) if self._has_logprobs else ()
        self._host_copy = HostCopy([token_R, *logprobs])

    def tokens(self) -> list[SampledToken]:
        """Wait for the copy and return a token for each row."""
        tokens, *logprobs_by_row = (array.tolist() for array in self._host_copy.arrays())
        if not self._has_logprobs:
            return [SampledToken(token_id) for token_id in tokens]
        return [
            SampledToken(token_id)
            if count is None
            else SampledToken(token_id, own, tuple(zip(ids[:count], logprobs[:count], strict=True)))
            for token_id, own, ids, logprobs, count in zip(tokens, *logprobs_by_row, self._num_logprobs, strict=True)
        ]


def sample(logits_RV: Tensor, draws: Many[SamplingInput]) -> SampledBatch:
    """Sample a token for each row. Does not wait for the device."""
    changed_RV = _with_changes(logits_RV, draws)
    token_R = changed_RV.argmax(-1)
    temperature = np.array([draw.sampling.temperature for draw in draws], dtype=np.float32)
    if temperature.any():
        temperature_R = to_device(temperature, logits_RV.device)
        scaled_RV = changed_RV / temperature_R.clamp_min(_SMALLEST_TEMPERATURE).unsqueeze(-1)
        drawn_R = _invert(
            cut_tails(scaled_RV, [draw.sampling for draw in draws]), np.array([_uniform(draw) for draw in draws])
        )
        token_R = torch.where(temperature_R > 0, drawn_R, token_R)
    return SampledBatch(token_R, logits_RV, [draw.sampling.num_logprobs for draw in draws])


def _with_changes(logits_RV: Tensor, draws: Many[SamplingInput]) -> Tensor:
    if not any(draw.changes_logits for draw in draws):
        return logits_RV
    logits_RV = logits_RV.clone()
    for row_V, draw in zip(logits_RV, draws, strict=True):
        if draw.sampling.changes_logits:
            _change(row_V, draw)
        if draw.allowed is not None:
            is_allowed_V = np.unpackbits(draw.allowed.view(np.uint8), count=len(row_V), bitorder="little")
            row_V.masked_fill_(to_device(is_allowed_V == 0, row_V.device), -torch.inf)
    return logits_RV


def _change(row_V: Tensor, draw: SamplingInput) -> None:
    """Apply penalties and biases to one row in place."""
    sampling, device = draw.sampling, row_V.device
    if sampling.repetition_penalty != 1:
        seen_S = to_device(np.unique(draw.tokens), device)
        logit_S = row_V[seen_S]
        row_V[seen_S] = torch.where(
            logit_S > 0, logit_S / sampling.repetition_penalty, logit_S * sampling.repetition_penalty
        )
    if sampling.presence_penalty or sampling.frequency_penalty:
        tokens, counts = np.unique(draw.tokens[draw.num_prompt_tokens :], return_counts=True)
        count_V = torch.zeros_like(row_V).index_copy_(
            0, to_device(tokens.astype(np.int64), device), to_device(counts, device).to(row_V.dtype)
        )
        row_V -= sampling.frequency_penalty * count_V + sampling.presence_penalty * (count_V > 0)
    for token_id, bias in sampling.logit_bias.items():
        row_V[token_id] += bias
    row_V.clamp_(-_LARGEST_LOGIT, _LARGEST_LOGIT)


def cut_tails(scaled_RV: Tensor, params: Many[SamplingParams]) -> Tensor:
    """Return scores after the temperature, with -inf for tokens that each row's min-p, top-k and top-p exclude.

    Without sorting the vocabulary, in fixed shapes and without waiting for the device. All three keep a prefix of the
    same order: by score, ties by id. Rows with a top-k are cut among their best k tokens. Otherwise top-p becomes a
    score threshold at which the probabilities of the tokens at or above it reach a target; the threshold is found digit
    by digit, with a sum for each value of a digit. Probabilities are summed as integers of 2^-52: their sums are exact,
    independent of the device's order of addition.
    """
    num_tokens = scaled_RV.shape[-1]
    among_few = [row for row, sampling in enumerate(params) if 0 < sampling.top_k < num_tokens]
    among_all = [
        row
        for row, sampling in enumerate(params)
        if not 0 < sampling.top_k < num_tokens and (sampling.min_p or sampling.top_p < 1)
    ]
    for rows, cut in ((among_few, _cut_among_few), (among_all, _cut_among_all)):
        if rows:
            row_R = to_device(np.array(rows), scaled_RV.device)
            scaled_RV = scaled_RV.index_copy(0, row_R, cut(scaled_RV[row_R], [params[row] for row in rows]))
    return scaled_RV


def _cut_among_few(scaled_RV: Tensor, params: Many[SamplingParams]) -> Tensor:
    """Cut rows that all have a top-k: among the tokens of the largest k, best first."""
    id_V = torch.arange(scaled_RV.shape[-1], device=scaled_RV.device)
    id_RN = top_by_score(scaled_RV.float(), id_V, max(sampling.top_k for sampling in params))
    is_few_RN = id_V[: id_RN.shape[-1]] < _column([sampling.top_k for sampling in params], scaled_RV)
    mass_RN = scaled_RV.double().softmax(-1).gather(-1, id_RN)
    scaled_RN = scaled_RV.gather(-1, id_RN)
    is_kept_RN = is_few_RN & _are_kept(scaled_RN, mass_RN.masked_fill(~is_few_RN, 0.0), params)
    kept_RN = scaled_RN.masked_fill(~is_kept_RN, -torch.inf)
    return torch.full_like(scaled_RV, -torch.inf).scatter(-1, id_RN, kept_RN)


def _cut_among_all(scaled_RV: Tensor, params: Many[SamplingParams]) -> Tensor:
    return scaled_RV.masked_fill(~_are_kept(scaled_RV, scaled_RV.double().softmax(-1), params), -torch.inf)


def _are_kept(scaled_RN: Tensor, mass_RN: Tensor, params: Many[SamplingParams]) -> Tensor:
    """Return which tokens min-p and then top-p keep. Tokens with equal scores are in the order of their ids."""
    is_kept_RN = mass_RN >= _column([sampling.min_p for sampling in params], mass_RN) * mass_RN.amax(-1, keepdim=True)
    if all(sampling.top_p == 1 for sampling in params):
        return is_kept_RN
    unit_RN = (mass_RN * _ONE).long().mul_(is_kept_RN)
    top_p_R1 = _column([sampling.top_p for sampling in params], mass_RN)
    target_R1 = (top_p_R1 * unit_RN.sum(-1, keepdim=True)).ceil().long().clamp_min_(1)  # it may round to zero
    key_RN = ordered_bits(scaled_RN.float()) + 2**31
    return is_kept_RN & _first(key_RN, unit_RN, target_R1.masked_fill_(top_p_R1 == 1, 2**62))


def _first(key_RN: Tensor, weight_RN: Tensor, target_R1: Tensor) -> Tensor:
    """Return the tokens, by key and then by index, up to the token at which the sum of weights reaches the target.

    Returns all tokens if the sum does not reach it.
    """
    shift = sum(_DIGIT_BITS)
    found_R1, above_R1 = torch.zeros_like(target_R1), torch.zeros_like(target_R1)
    for bits in _DIGIT_BITS:
        is_inside_RN = (key_RN >> shift) == found_R1
        shift -= bits
        digit_RN = (key_RN >> shift) & (2**bits - 1)
        sum_RH = weight_RN.new_zeros(len(key_RN), 2**bits).scatter_add_(-1, digit_RN, weight_RN * is_inside_RN)
        reach_RH = sum_RH.flip(-1).cumsum(-1).flip(-1) + above_R1
        digit_R1 = ((reach_RH >= target_R1).sum(-1, keepdim=True) - 1).clamp_min_(0)
        above_R1 = (reach_RH - sum_RH).gather(-1, digit_R1)
        found_R1 = (found_R1 << bits) | digit_R1
    is_tied_RN = key_RN == found_R1
    before_RN = above_R1 + (is_tied_RN.cumsum(-1) - 1) * weight_RN  # tied tokens have equal weights
    return (key_RN > found_R1) | (is_tied_RN & (before_RN < target_R1))


def _column(values: Many[float], like: Tensor) -> Tensor:
    return to_device(np.array(values, dtype=np.float64), like.device).unsqueeze(-1)


def _invert(logits_RV: Tensor, uniform_R: np.ndarray) -> Tensor:
    mass_RV = logits_RV.double().softmax(-1).cumsum(-1)
    total_R1 = mass_RV[:, -1:].contiguous()
    target_R1 = to_device(uniform_R.astype(np.float32), mass_RV.device).unsqueeze(-1) * total_R1
    # The last token of nonzero probability bounds the draw: a uniform number may round up to one.
    last_R1 = torch.searchsorted(mass_RV, total_R1)
    found_R1 = torch.searchsorted(mass_RV, target_R1, right=True)
    last_token = mass_RV.shape[-1] - 1  # both indices are beyond it if all logits are NaN
    return torch.minimum(found_R1, last_R1).clamp_max_(last_token).squeeze(-1)


def _uniform(draw: SamplingInput) -> float:
    position = len(draw.tokens) + draw.num_pending
    return float(np.random.Generator(np.random.Philox(key=draw.sampling.seed, counter=position)).random())


def _logprobs(logits_RV: Tensor, token_R: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logprob of each row's token, then the ids and logprobs of the most probable tokens, ties by id."""
    logprob_RV = logits_RV.float().log_softmax(-1)
    id_V = torch.arange(logprob_RV.shape[-1], device=logprob_RV.device)
    id_RN = top_by_score(logprob_RV, id_V, min(most, len(id_V)))
    return logprob_RV.gather(-1, token_R.unsqueeze(-1)).squeeze(-1), id_RN, logprob_RV.gather(-1, id_RN)
