"""The reference decoder with the gated delta rule (delta_rule.py) as attention: each layer keeps a state of fixed size.

As in Yang, Kautz and Hatamizadeh, queries, keys and values first pass a causal convolution over the newest
`CONV_TOKENS` tokens, which replaces rope, keys and queries have length 1, and a gate scales the normalised output. A
`LayerState` per layer summarises a history, so the next item costs the same after 10 items and after 10,000.

Shape suffixes: B rows, L positions, T = B * L tokens, D hidden, H heads, K head size, W = H * K, X the convolution's
tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.quality.delta_rule import delta_rule, delta_step
from models.decoder.config import DecoderConfig
from models.decoder.decoder import Attend, Decoder, DecoderLayer, RMSNorm

CONV_TOKENS = 4
_FIRST_DECAY = 4.0
"""Bias of a new layer's decay: each token keeps sigmoid(4) = 98 % of the state."""


@dataclass(frozen=True, slots=True)
class LayerState:
    """One layer's summary of the histories: values by keys (B, H, K, K), and the newest inputs (B, 3 W, X - 1)."""

    values: Tensor
    newest: Tensor

    @property
    def num_bytes(self) -> int:
        """The bytes of all rows."""
        return self.values.nbytes + self.newest.nbytes


class DeltaLayer(DecoderLayer):
    """One pre-norm layer whose attention is the gated delta rule."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__(config, index)
        heads, width = config.num_attention_heads, config.num_attention_heads * config.head_dim
        self["write"] = nn.Linear(config.hidden_size, heads)
        self["decay"] = nn.Linear(config.hidden_size, heads)
        self["out_gate"] = nn.Linear(config.hidden_size, width, bias=False)
        self["conv"] = nn.Conv1d(3 * width, 3 * width, CONV_TOKENS, groups=3 * width, bias=False)
        self["head_norm"] = RMSNorm(config.head_dim, config.rms_norm_eps)
        self._heads = heads

    def draw_gates(self) -> None:
        """Draw the convolution, and start with half-strength writes and a slow decay."""
        cast("nn.Conv1d", self["conv"]).reset_parameters()
        nn.init.zeros_(cast("nn.Linear", self["write"]).bias)
        nn.init.constant_(cast("nn.Linear", self["decay"]).bias, _FIRST_DECAY)

    def empty(self, num_rows: int, like: Tensor) -> LayerState:
        """Return the state of rows without tokens."""
        size = self._head_dim
        return LayerState(
            like.new_zeros(num_rows, self._heads, size, size),
            like.new_zeros(num_rows, 3 * self._heads * size, CONV_TOKENS - 1),
        )

    def advance(self, x_BLD: Tensor, state: LayerState) -> tuple[Tensor, LayerState]:
        """Return the layer's output (B, L, D) and the state after these tokens."""
        normed_BLD = self["attention_norm"](x_BLD)
        joined_BWL = torch.cat([self[name](normed_BLD) for name in ("q", "k", "v")], dim=-1).mT
        inputs = torch.cat([state.newest, joined_BWL], dim=-1)
        mixed_BLW = functional.silu(self["conv"](inputs)).mT
        q, k, v = (
            part.reshape(*part.shape[:2], self._heads, self._head_dim).transpose(1, 2)
            for part in mixed_BLW.chunk(3, dim=-1)
        )
        write_BHL = torch.sigmoid(self["write"](normed_BLD)).mT
        log_decay_BHL = functional.logsigmoid(self["decay"](normed_BLD)).mT
        arguments = (functional.normalize(q, dim=-1), functional.normalize(k, dim=-1), v, write_BHL, log_decay_BHL)
        out_BHLK, values = _attend(state.values, arguments)
        gate_BLW = functional.silu(self["out_gate"](normed_BLD))
        x_BLD = x_BLD + self["output"](self["head_norm"](out_BHLK).transpose(1, 2).flatten(-2) * gate_BLW)
        x_BLD = x_BLD + self._feed_forward(self["ffn_norm"](x_BLD))
        return x_BLD, LayerState(values, inputs[..., 1 - CONV_TOKENS :])


def _attend(state_BHKK: Tensor, arguments: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    if arguments[0].shape[2] > 1:
        return delta_rule(state_BHKK, *arguments)
    out_BHK, after_BHKK = delta_step(state_BHKK, *(part[:, :, 0] for part in arguments))
    return out_BHK[:, :, None], after_BHKK


class DeltaDecoder(Decoder):
    """Embedding, layers with a state, final norm and output head."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(DeltaLayer(config, index) for index in range(config.num_hidden_layers))

    @property
    def delta_layers(self) -> Sequence[DeltaLayer]:
        """The layers, typed."""
        return cast("Sequence[DeltaLayer]", self.layers)

    def advance(self, tokens_BL: Tensor, states: Sequence[LayerState] | None = None) -> tuple[Tensor, list[LayerState]]:
        """Return the hidden states (B, L, D) after the final norm, and the layers' states after these tokens."""
        x_BLD, after = self.embedding(tokens_BL), []
        for number, layer in enumerate(self.delta_layers):
            before = layer.empty(len(tokens_BL), x_BLD) if states is None else states[number]
            x_BLD, state = layer.advance(x_BLD, before)
            after.append(state)
        return self.norm(x_BLD), after

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """Return the hidden states (T, D) of rows of equal length, each from position 0. `attend` is not used."""
        num_rows = int((positions_T == 0).sum())
        return self.advance(token_ids_T.view(num_rows, -1))[0].flatten(0, 1)
