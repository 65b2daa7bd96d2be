"""A decoder of the Llama, Qwen2 and Qwen3 families as one small module, used by training and by the engine alike.

It knows nothing of KV caches, batches of requests or items: attention over the context is handed in (`Attend`), so that
training passes dense causal attention and the engine passes paged attention over the very same weights. Parameter names
are those of Hugging Face's checkpoints, so a folder in that layout loads by name. The families differ in two things:
biases (Qwen2 on query, key and value), and norms on each query and key head (Qwen3).

Shape suffixes: T tokens (flattened over the batch), D hidden, H query heads, G key/value heads, K head size, F feed-forward, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.decoder.rope import Rope, rotary_angles, rotate
from models.decoder.window import Window

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q_THK, k_TGK, v_TGK) -> out_THK: attention over each token's own context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The shape of a decoder, mostly under the key names of a Hugging Face `config.json`.

    `qkv_bias` and `output_bias` are the attention's; `qk_norm` normalises each query and key head before it is turned.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope: Rope = field(default_factory=Rope)
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    window: Window | None = None
    """Which layers see a part of their past alone. Whoever hands in `Attend` must honour it."""

    def window_of(self, layer: int) -> Window | None:
        """Return the window of one layer, None if it sees everything before it."""
        return self.window if self.window is not None and layer in self.window.layers else None

    @property
    def window_of_all(self) -> Window | None:
        """The window, where every layer has it: then a token behind it, the sinks apart, is never seen again."""
        return self.window if self.window is not None and len(self.window.layers) == self.num_hidden_layers else None


class RMSNorm(nn.Module):
    """Root-mean-square normalisation (Zhang and Sennrich 2019), computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise along the last dimension. (..., size) -> (..., size)."""
        return functional.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class Attention(nn.Module):
    """Projections, head norms where the family has them, and rotary positions around the attention that is handed in."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        num_query, num_key = (config.head_dim * n for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(config.hidden_size, num_query, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, num_key, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, num_key, bias=config.qkv_bias)
        self.o_proj = nn.Linear(num_query, config.hidden_size, bias=config.output_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self._has_norms = config.qk_norm

    def forward(self, x_TD: Tensor, cos_TK: Tensor, sin_TK: Tensor, attend: Attend) -> Tensor:
        """Attend over each token's context. (T, D) -> (T, D)."""
        q_THK = self.q_proj(x_TD).unflatten(-1, (-1, self.head_dim))
        k_TGK = self.k_proj(x_TD).unflatten(-1, (-1, self.head_dim))
        v_TGK = self.v_proj(x_TD).unflatten(-1, (-1, self.head_dim))
        if self._has_norms:
            q_THK, k_TGK = self.q_norm(q_THK), self.k_norm(k_TGK)
        q_THK, k_TGK = rotate(q_THK, cos_TK, sin_TK), rotate(k_TGK, cos_TK, sin_TK)
        projected: Tensor = self.o_proj(attend(self.layer, q_THK, k_TGK, v_TGK).flatten(-2))
        return projected


class FeedForward(nn.Module):
    """The gated feed-forward layer, SwiGLU (Shazeer 2020)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

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
        """Return the hidden state after the final norm. (T,) tokens at (T,) positions -> (T, D)."""
        x_TD = self.model.embed_tokens(token_ids_T)
        cos_TK, sin_TK = rotary_angles(positions_T, self.config.head_dim, self.config.rope, x_TD.dtype)
        for layer in self.model.layers:
            x_TD = layer(x_TD, cos_TK, sin_TK, attend)
        hidden: Tensor = self.model.norm(x_TD)
        return hidden
