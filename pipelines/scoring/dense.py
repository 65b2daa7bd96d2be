"""The decoder over padded batches with dense causal attention, for training and offline scoring: no KV cache.

Padding is at each row's end, so the causal mask keeps it out of all real positions.

Shape suffixes: B rows, L positions of a row, T = B * L tokens, H heads, G key/value heads, K head size, D hidden, V
items.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from models.catalogue import BOS_TOKEN, Catalogue
from models.decoder.decoder import Attend, Decoder
from models.prompt import Prompt


def causal_attention(num_rows: int) -> Attend:
    """Return dense attention: each token attends to itself and to earlier tokens of its row."""

    def attend(layer: int, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> Tensor:
        q_BHLK, k_BGLK, v_BGLK = (x.view(num_rows, -1, *x.shape[1:]).transpose(1, 2) for x in (q_THK, k_TGK, v_TGK))
        out_BHLK = functional.scaled_dot_product_attention(
            q_BHLK, k_BGLK, v_BGLK, is_causal=True, enable_gqa=q_BHLK.shape[1] != k_BGLK.shape[1]
        )
        return out_BHLK.transpose(1, 2).flatten(0, 1)

    return attend


def hidden_states(decoder: Decoder, tokens_BL: Tensor) -> Tensor:
    """Run the decoder over padded rows, each from position 0. (B, L) -> (B * L, D)."""
    num_rows, length = tokens_BL.shape
    positions_T = torch.arange(length, device=tokens_BL.device).repeat(num_rows)
    hidden_TD: Tensor = decoder(tokens_BL.reshape(-1), positions_T, causal_attention(num_rows))
    return hidden_TD


def right_padded(
    rows: Sequence[Sequence[int] | np.ndarray], padding: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return rows of integers as (B, L), padded at the end, and the position (B,) of each row's last integer."""
    lengths = np.array([len(row) for row in rows])
    padded = np.full((len(rows), lengths.max()), padding, dtype=np.int64)
    for row, values in enumerate(rows):
        padded[row, : len(values)] = values
    return torch.from_numpy(padded).to(device), torch.from_numpy(lengths - 1).to(device)


class DecoderScorer:
    """Scores histories over the whole catalogue with the prompt that serving uses. For codes of depth 1."""

    def __init__(self, decoder: Decoder, catalogue: Catalogue, prompt: Prompt) -> None:
        assert catalogue.depth == 1, "deeper codes are scored by beam search"
        self._decoder, self._catalogue, self._prompt = decoder, catalogue, prompt

    @torch.inference_mode()
    def __call__(self, histories: Sequence[np.ndarray]) -> np.ndarray:
        """Score histories of item indices -> (B, V) float32 logits by item index."""
        self._decoder.eval()
        prompts = [self._prompt.tokens(self._catalogue, history.tolist()) for history in histories]
        tokens_BL, newest_B = right_padded(prompts, BOS_TOKEN, self._decoder.embedding.weight.device)
        hidden_BLD = hidden_states(self._decoder, tokens_BL).view(*tokens_BL.shape, -1)
        last_BD = hidden_BLD[torch.arange(len(prompts), device=tokens_BL.device), newest_B]
        first = self._catalogue.token_offsets[0] + torch.from_numpy(self._catalogue.codes[:, 0]).long()
        head_VD = self._decoder.head_weight_VD[first.to(tokens_BL.device)]
        scores_BV: np.ndarray = (last_BD @ head_VD.T).float().cpu().numpy()
        return scores_BV
