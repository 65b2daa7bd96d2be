"""Rotary position embedding (Su et al. 2021), with the scalings that extend it beyond the trained length.

A pair of numbers of a head rotates once per 2 pi times its `period` positions. Scaling lengthens the periods: all alike
(linear), or only those too long to complete a rotation in training (llama3; YaRN, Peng et al. 2023). Llama's half-split
layout: pair i is numbers i and i + K / 2.

Shape suffixes: T tokens, K head size, P = K / 2 pairs.
"""

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from models.decoder.rope_config import Rope, RopeKind, RopeScaling


def rotary_angles(positions_T: Tensor, head_dim: int, rope: Rope, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosine and sine (T, K) of each position's angles, multiplied by the scaling's attention factor."""
    angles_TK = (positions_T.float().unsqueeze(-1) / periods(head_dim, rope, positions_T.device)).repeat(1, 2)
    factor = 1.0 if rope.scaling is None else rope.scaling.attention_factor
    return (angles_TK.cos() * factor).to(dtype), (angles_TK.sin() * factor).to(dtype)


def rotate(x_THK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Rotate each head by its token's angles. (T, H, K) -> (T, H, K)."""
    low, high = x_THK.chunk(2, dim=-1)
    return x_THK * cos_TK.unsqueeze(-2) + torch.cat((-high, low), dim=-1) * sin_TK.unsqueeze(-2)


@cache
@torch.inference_mode(mode=False)
def periods(head_dim: int, rope: Rope, device: torch.device) -> Tensor:
    """Return the scaled period (positions per radian) of each pair, (P,) fp32.

    Cached permanently, because captured graphs read it in place.
    """
    period_P = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.scaling is not None:
        kept_P = _KEPT[rope.scaling.kind](period_P, rope.theta, rope.scaling)
        period_P = 1.0 / (kept_P / period_P + (1.0 - kept_P) / (period_P * rope.scaling.factor))
    return period_P.to(device)


def _linear_kept(period_P: Tensor, _theta: float, _scaling: RopeScaling) -> Tensor:
    return torch.zeros_like(period_P)


def _llama3_kept(period_P: Tensor, _theta: float, scaling: RopeScaling) -> Tensor:
    """Interpolate by each pair's number of rotations within the trained length."""
    rotations_P = scaling.original_positions / (2.0 * math.pi * period_P)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    return ((rotations_P - scaling.low_freq_factor) / span).clamp(0.0, 1.0)


def _yarn_kept(period_P: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Interpolate linearly between the pairs that rotate `beta_fast` and `beta_slow` times in the trained length."""
    num_pairs = len(period_P)

    def pair_with_rotations(rotations: float) -> float:
        return num_pairs * math.log(scaling.original_positions / (rotations * 2.0 * math.pi)) / math.log(theta)

    first = max(math.floor(pair_with_rotations(scaling.beta_fast)), 0)
    last = min(math.ceil(pair_with_rotations(scaling.beta_slow)), 2 * num_pairs - 1)
    stretched_P = (torch.arange(num_pairs, dtype=torch.float32) - first) / max(last - first, 1e-3)
    return 1.0 - stretched_P.clamp(0.0, 1.0)


_KEPT: dict[RopeKind, Callable[[Tensor, float, RopeScaling], Tensor]] = {
    "linear": _linear_kept,
    "llama3": _llama3_kept,
    "yarn": _yarn_kept,
}
"""Weight (0 to 1) of each pair's original frequency; the rest is the frequency divided by the factor."""
