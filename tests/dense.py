"""The slow way to run a decoder: dense causal attention over one whole sequence."""

import torch
from torch import Tensor
from torch.nn import functional

from models.decoder import Decoder


def dense_attend(_layer: int, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> Tensor:
    """Attend causally over one sequence, densely."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THK, k_TGK, v_TGK))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)


def logits_of(decoder: Decoder, tokens_T: Tensor) -> Tensor:
    """Give a decoder's logits (T, V) over one sequence."""
    with torch.inference_mode():
        return decoder(tokens_T, torch.arange(len(tokens_T)), dense_attend) @ decoder.head_weight_VD.T
