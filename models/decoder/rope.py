"""Rotary positions (Su et al. 2021), and the ways in which Llama and Qwen checkpoints stretch them beyond the trained length.

A pair of a head's numbers turns once in 2 pi times its `period` of positions. Scaling lengthens the periods: all alike
(linear), or only those too long to have been seen whole in training (llama3; YaRN, Peng et al. 2023). In the half-split
layout of Llama. Knows no weights.

Shape suffixes: T tokens, K head size, P = K / 2 pairs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

RopeKind = Literal["linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How periods are lengthened by up to `factor`.

    `original_positions` is the trained length. llama3 leaves pairs alone that turn more than `high_freq_factor` times in
    it and lengthens those fully that turn less than `low_freq_factor` times; YaRN does so at `beta_fast` and `beta_slow`
    turns, and multiplies cosine and sine by `attention_factor`.
    """

    kind: RopeKind
    factor: float
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary positions of one checkpoint: the base of the periods, and how they are scaled, if at all."""

    theta: float = 10_000.0
    scaling: RopeScaling | None = None


def rotary_angles(positions_T: Tensor, head_dim: int, rope: Rope, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosine and sine (T, K) of each position's angles."""
    angles_TK = (positions_T.float().unsqueeze(-1) / periods(head_dim, rope, positions_T.device)).repeat(1, 2)
    strength = 1.0 if rope.scaling is None else rope.scaling.attention_factor
    return (angles_TK.cos() * strength).to(dtype), (angles_TK.sin() * strength).to(dtype)


def rotate(x_THK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Turn each head by its token's angles. (T, H, K) -> (T, H, K)."""
    low, high = x_THK.chunk(2, dim=-1)
    return x_THK * cos_TK.unsqueeze(-2) + torch.cat((-high, low), dim=-1) * sin_TK.unsqueeze(-2)


@cache
@torch.inference_mode(mode=False)
def periods(head_dim: int, rope: Rope, device: torch.device) -> Tensor:
    """Return the positions per radian of each pair (P,) fp32, scaled. Kept for good: recorded steps read it where it lies."""
    period_P = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.scaling is not None:
        kept_P = _KEPT[rope.scaling.kind](period_P, rope.theta, rope.scaling)
        period_P = 1.0 / (kept_P / period_P + (1.0 - kept_P) / (period_P * rope.scaling.factor))
    return period_P.to(device)


def yarn_attention_factor(factor: float) -> float:
    """Return what YaRN multiplies cosine and sine by when the checkpoint does not say."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _linear_kept(period_P: Tensor, _theta: float, _scaling: RopeScaling) -> Tensor:
    return torch.zeros_like(period_P)


def _llama3_kept(period_P: Tensor, _theta: float, scaling: RopeScaling) -> Tensor:
    """Blend by how often each pair turns within the trained length."""
    turns_P = scaling.original_positions / (2.0 * math.pi * period_P)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    return ((turns_P - scaling.low_freq_factor) / span).clamp(0.0, 1.0)


def _yarn_kept(period_P: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Blend along the pairs' numbers, between the two that turn `beta_fast` and `beta_slow` times in the trained length."""
    num_pairs = len(period_P)

    def pair_turning(times: float) -> float:
        return num_pairs * math.log(scaling.original_positions / (times * 2.0 * math.pi)) / math.log(theta)

    first = max(math.floor(pair_turning(scaling.beta_fast)), 0)
    last = min(math.ceil(pair_turning(scaling.beta_slow)), 2 * num_pairs - 1)
    stretched_P = (torch.arange(num_pairs, dtype=torch.float32) - first) / max(last - first, 1e-3)
    return 1.0 - stretched_P.clamp(0.0, 1.0)


_KEPT: dict[RopeKind, Callable[[Tensor, float, RopeScaling], Tensor]] = {
    "linear": _linear_kept,
    "llama3": _llama3_kept,
    "yarn": _yarn_kept,
}
"""The share (0 to 1) of each pair's period that stays as it was trained."""
