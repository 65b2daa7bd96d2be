"""Runs a decoder with dense causal attention over one whole sequence, with its layers' windows."""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from models.decoder.decoder import Decoder
from models.decoder.window import Window


def dense_attend(layer: int, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, *, window: Window | None = None) -> Tensor:
    """Attend causally over one sequence; in layers with a window, within it."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THK, k_TGK, v_TGK))
    seen_TT = seen_by_rows(len(q_THK), window if window is not None and layer in window.layers else None)
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen_TT, enable_gqa=True)
    return out[0].transpose(0, 1)


def seen_by_rows(num_tokens: int, window: Window | None) -> Tensor:
    """Return which positions each row sees, (T, T) bool."""
    row, position = torch.arange(num_tokens)[:, None], torch.arange(num_tokens)
    seen = position <= row
    if window is None:
        return seen
    return seen & ((position > row - window.size) | (position < window.num_sinks))


def hidden_of(decoder: Decoder, tokens_T: Tensor) -> Tensor:
    """Return a decoder's hidden states (T, D) over one sequence."""
    attend = partial(dense_attend, window=decoder.config.window)
    with torch.inference_mode():
        return decoder(tokens_T, torch.arange(len(tokens_T)), attend)


def logits_of(decoder: Decoder, tokens_T: Tensor) -> Tensor:
    """Return a decoder's logits (T, V) over one sequence."""
    with torch.inference_mode():
        return hidden_of(decoder, tokens_T) @ decoder.head_weight_VD.T
