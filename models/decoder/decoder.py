"""The reference decoder of the Llama, Mistral, Qwen2 and Qwen3 families.

Training uses it, and the engine takes its weights from it. Its modules follow the tables of `layer.py`. It does not
know KV caches, request batches or items: attention is passed in (`Attend`), dense and causal in training, paged in the
engine.

Shape suffixes: T tokens (flattened over the batch), D hidden, H query heads, G key/value heads, K head size, F
feed-forward, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.decoder.config import DecoderConfig
from models.decoder.layer import Norm, rows_of
from models.decoder.rope import rotary_angles, rotate

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q_THK, k_TGK, v_TGK) -> out_THK: attention over each token's own context."""


class RMSNorm(nn.Module):
    """Root-mean-square normalisation (Zhang and Sennrich 2019), computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise along the last dimension. (..., size) -> (..., size)."""
        return functional.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class DecoderLayer(nn.ModuleDict):
    """One pre-norm transformer layer: attention with rope, and a gated feed-forward layer, SwiGLU (Shazeer 2020)."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        for row in rows_of(config):
            if isinstance(row, Norm):
                self[row.name] = RMSNorm(row.size(config), config.rms_norm_eps)
            else:
                self[row.name] = nn.Linear(row.columns(config), row.rows(config), bias=row.has_bias(config))
        self._index = index
        self._head_dim = config.head_dim
        self._has_qk_norm = config.qk_norm

    def forward(self, x_TD: Tensor, cos_TK: Tensor, sin_TK: Tensor, attend: Attend) -> Tensor:
        """(T, D) -> (T, D)."""
        x_TD = x_TD + self._attention(self["attention_norm"](x_TD), cos_TK, sin_TK, attend)
        x_TD = x_TD + self._feed_forward(self["ffn_norm"](x_TD))
        return x_TD

    def _attention(self, x_TD: Tensor, cos_TK: Tensor, sin_TK: Tensor, attend: Attend) -> Tensor:
        q_THK, k_TGK, v_TGK = (self[name](x_TD).unflatten(-1, (-1, self._head_dim)) for name in ("q", "k", "v"))
        if self._has_qk_norm:
            q_THK, k_TGK = self["query_norm"](q_THK), self["key_norm"](k_TGK)
        q_THK, k_TGK = rotate(q_THK, cos_TK, sin_TK), rotate(k_TGK, cos_TK, sin_TK)
        projected: Tensor = self["output"](attend(self._index, q_THK, k_TGK, v_TGK).flatten(-2))
        return projected

    def _feed_forward(self, x_TD: Tensor) -> Tensor:
        mixed: Tensor = self["down"](functional.silu(self["gate"](x_TD)) * self["up"](x_TD))
        return mixed


class Decoder(nn.Module):
    """Embedding, layers, final norm and output head. The tokens of all requests are flattened into one axis."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def head_weight_VD(self) -> Tensor:
        """The output matrix (V, D); a contiguous range of rows scores one code level."""
        return self.embedding.weight if self.config.tie_word_embeddings else self.head.weight

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """Return the hidden states after the final norm. (T,) tokens at (T,) positions -> (T, D)."""
        x_TD = self.embedding(token_ids_T)
        cos_TK, sin_TK = rotary_angles(positions_T, self.config.head_dim, self.config.rope, x_TD.dtype)
        for layer in self.layers:
            x_TD = layer(x_TD, cos_TK, sin_TK, attend)
        hidden: Tensor = self.norm(x_TD)
        return hidden
