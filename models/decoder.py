"""A Llama-family decoder as one small module, used by training and by the engine alike.

It knows nothing of KV caches, batches of requests or items: attention over the context is handed in (`Attend`), so that
training passes dense causal attention and the engine passes paged attention over the very same weights. Parameter names
are those of Hugging Face's Llama checkpoints, so a folder in that layout loads by name.

Shape suffixes: T tokens (flattened over the batch), D hidden, H query heads, G key/value heads, K head size, F feed-forward, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q_THK, k_TGK, v_TGK) -> out_THK: attention over each token's own context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The shape of a decoder, under the key names of a Hugging Face `config.json`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True


class RMSNorm(nn.Module):
    """Root-mean-square normalisation (Zhang and Sennrich 2019), computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x_TD: Tensor) -> Tensor:
        """Normalise each row. (T, D) -> (T, D)."""
        return functional.rms_norm(x_TD.float(), self.weight.shape, self.weight.float(), self.eps).to(x_TD.dtype)


class Attention(nn.Module):
    """Projections and rotary positions around the attention that is handed in."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(self, x_TD: Tensor, cos_TK: Tensor, sin_TK: Tensor, attend: Attend) -> Tensor:
        """Attend over each token's context. (T, D) -> (T, D)."""
        q_THK = rotate(self.q_proj(x_TD).unflatten(-1, (-1, self.head_dim)), cos_TK, sin_TK)
        k_TGK = rotate(self.k_proj(x_TD).unflatten(-1, (-1, self.head_dim)), cos_TK, sin_TK)
        v_TGK = self.v_proj(x_TD).unflatten(-1, (-1, self.head_dim))
        projected: Tensor = self.o_proj(attend(self.layer, q_THK, k_TGK, v_TGK).flatten(-2))
        return projected


class FeedForward(nn.Module):
    """The gated feed-forward layer, SwiGLU (Shazeer 2020)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        """(T, D) -> (T, D)."""
        mixed: Tensor = self.down_proj(functional.silu(self.gate_proj(x_TD)) * self.up_proj(x_TD))
        return mixed


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x_TD: Tensor, cos_TK: Tensor, sin_TK: Tensor, attend: Attend) -> Tensor:
        """(T, D) -> (T, D)."""
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), cos_TK, sin_TK, attend)
        x_TD = x_TD + self.mlp(self.post_attention_layernorm(x_TD))
        return x_TD


class Trunk(nn.Module):
    """Embedding, layers and final norm: what Hugging Face's checkpoints call `model`."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Decoder(nn.Module):
    """Trunk and output head. Tokens of all requests lie flat in one axis; `attend` knows which belongs to whom."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def head_weight_VD(self) -> Tensor:
        """The output matrix (V, D); rows lo:hi score one code level only."""
        if self.config.tie_word_embeddings:
            return self.model.embed_tokens.weight
        return self.lm_head.weight

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """Give the hidden state after the final norm. (T,) tokens at (T,) positions -> (T, D)."""
        x_TD = self.model.embed_tokens(token_ids_T)
        cos_TK, sin_TK = rotary_angles(positions_T, self.config.head_dim, self.config.rope_theta, x_TD.dtype)
        for layer in self.model.layers:
            x_TD = layer(x_TD, cos_TK, sin_TK, attend)
        hidden: Tensor = self.model.norm(x_TD)
        return hidden


def rotary_angles(positions_T: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Give cosine and sine (T, K) of the rotary embedding (Su et al. 2021), in the half-split layout of Llama."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions_T.device) / head_dim
    angles_TK = (positions_T.float().unsqueeze(-1) / theta**exponents).repeat(1, 2)
    return angles_TK.cos().to(dtype), angles_TK.sin().to(dtype)


def rotate(x_THK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Turn each head by its token's angles. (T, H, K) -> (T, H, K)."""
    low, high = x_THK.chunk(2, dim=-1)
    return x_THK * cos_TK.unsqueeze(-2) + torch.cat((-high, low), dim=-1) * sin_TK.unsqueeze(-2)
