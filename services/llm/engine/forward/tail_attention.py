"""Attention of beams over their own few tokens, and how two attentions over disjoint keys become one. Plain torch.

Shape suffixes: B beams, L places of a tail, H query heads, G key/value heads, M = H / G, K head size.
"""

import torch
from torch import Tensor


def tail_attention(q_BHK: Tensor, k_BLGK: Tensor, v_BLGK: Tensor, seen_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Attend each beam over its own few tokens. Gives the output (B, H, K) and the log-sum-exp (B, H), both fp32."""
    num_groups = k_BLGK.shape[2]
    q_BGMK = q_BHK.float().view(len(q_BHK), num_groups, -1, q_BHK.shape[-1]) * q_BHK.shape[-1] ** -0.5
    score_BGML = q_BGMK @ k_BLGK.float().permute(0, 2, 3, 1)
    score_BGML.masked_fill_(~seen_BL[:, None, None, :], -torch.inf)
    lse_BGM = score_BGML.logsumexp(-1)
    out_BGMK = (score_BGML - lse_BGM.unsqueeze(-1)).exp_() @ v_BLGK.float().transpose(1, 2)
    return out_BGMK.flatten(1, 2), lse_BGM.flatten(1)


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Tensor:
    """Combine attention over two disjoint sets of keys into attention over their union."""
    share_a = (lse_a - lse_b).sigmoid_().unsqueeze(-1)
    return torch.lerp(out_b, out_a.float(), share_a).to(out_a.dtype)
