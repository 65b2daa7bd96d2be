"""The forward pass of a step, from tokens to hidden states: a loop over the layers with fused operations.

The rows of all requests are flattened into one axis: the chunks' tokens, whose keys and values go to the paged cache,
then the beams, whose keys and values go to their tails. Projections are joined to matrices. The loop copies nothing to
the host and has no data-dependent control flow, so a graph can capture it over inputs that stay in place. It does not
know requests or items.

Shape suffixes: T rows of the step, P rows that go to the paged cache, B beams, D hidden, V vocabulary, R rows, H query
heads, G key/value heads, K head size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from models.decoder.rope import rotary_angles
from services.llm.engine.beam.tails import Tails
from services.llm.engine.forward.adapters import AdapterRows, AdapterSlots, StepAdapters
from services.llm.engine.forward.attention import PagedAttention, TileBatch, UniformBatch
from services.llm.engine.forward.ops import Ops
from services.llm.engine.forward.weights import DecoderWeights, LayerWeights
from services.llm.engine.kv.cache import KvCache
from services.llm.engine.plan import StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """The tensors of one step. `pages` is the result of the attention's `prepare`.

    `output_rows_R` are the rows whose hidden states are read, ascending; None: all. The last layer computes only its
    keys and values for the other rows. `adapters` is None if all rows belong to the base.
    """

    tokens_T: Tensor
    positions_T: Tensor
    slot_mapping_P: Tensor
    pages: Any
    tails: Tails | None
    output_rows_R: Tensor | None = None
    adapters: StepAdapters | None = None


class Forward(Protocol):
    """The interface of a forward pass, on any device."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, as they stay in memory."""
        ...

    def use_adapters(self, slots: AdapterSlots | None) -> None:
        """Read the adapters of later steps from these slots; None if no step has any."""
        ...

    def prepare(self, plan: StepPlan) -> Any:
        """Return the pages that each row of a step sees, in the attention's format."""
        ...

    def hidden(self, step: StepInputs) -> Tensor:
        """Return the hidden states (R, D) of the output rows after the final norm; store all keys and values."""
        ...

    def logits(self, hidden_RD: Tensor, first: int, last: int) -> Tensor:
        """Return the fp32 logits of the tokens `first` to `last` - 1. (..., D) -> (..., last - first)."""
        ...


class LayerLoop:
    """Runs the layers in sequence in Python, on any device."""

    def __init__(
        self,
        weights: DecoderWeights,
        cache: KvCache,
        ops: Ops,
        attention: PagedAttention[Any],
        reduce: Callable[[Tensor], Tensor] = lambda part_TD: part_TD,
    ) -> None:
        """Create the loop. `reduce` sums the parts of all ranks, if the weights are one rank's shard."""
        self._reduce = reduce
        self._weights = weights
        self._cache = cache
        self._ops = ops
        self._attention = attention
        self._slots: AdapterSlots | None = None

    def prepare(self, plan: StepPlan) -> Any:
        """Return the pages that each row of a step sees, in the attention's format."""
        return self._attention.prepare(plan)

    def use_adapters(self, slots: AdapterSlots | None) -> None:
        """Read the adapters of later steps from these slots; None if no step has any."""
        self._slots = slots

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, in the model's dtype."""
        return self._weights.num_bytes

    def prepare_uniform(self, batch: UniformBatch) -> Any:
        """Return the pages for a step of one fixed shape, computed entirely on the device."""
        return self._attention.prepare_uniform(batch)

    @property
    def max_tile_rows(self) -> int:
        return self._attention.max_tile_rows

    def prepare_tiles(self, batch: TileBatch) -> Any:
        """Return the pages for a fixed number of tiles, computed entirely on the device."""
        return self._attention.prepare_tiles(batch)

    def hidden(self, step: StepInputs) -> Tensor:
        """Embed, run all layers, norm. Returns (R, D) of the output rows."""
        weights, ops, eps = self._weights, self._ops, self._weights.config.rms_norm_eps
        residual_TD = weights.embedding_VD[step.tokens_T]
        cos_sin = rotary_angles(step.positions_T, weights.config.head_dim, weights.config.rope, residual_TD.dtype)
        normed_TD = ops.rms_norm(residual_TD, weights.layers[0].attention_norm, eps)
        following = [*(layer.attention_norm for layer in weights.layers[1:]), weights.norm_D]
        for index, (layer, next_norm_D) in enumerate(zip(weights.layers, following, strict=True)):
            rows_R = step.output_rows_R if next_norm_D is weights.norm_D else None
            attended_TD = self._attend(index, layer, normed_TD, cos_sin, step, rows_R)
            kept = None if step.adapters is None else step.adapters.of(rows_R)
            residual_TD = residual_TD if rows_R is None else residual_TD[rows_R]
            normed_TD, residual_TD = ops.add_rms_norm(attended_TD, residual_TD, layer.ffn_norm, eps)
            fed_TD = self._feed_forward(index, layer, normed_TD, kept)
            normed_TD, residual_TD = ops.add_rms_norm(fed_TD, residual_TD, next_norm_D, eps)
        return normed_TD

    def logits(self, hidden_RD: Tensor, first: int, last: int) -> Tensor:
        """Multiply by these rows of the output matrix.

        On CUDA, products of 16-bit numbers are returned in the fp32 sums of cuBLAS.
        """
        head_ND = self._weights.head_VD[first:last]
        if hidden_RD.is_cuda and hidden_RD.dtype in (torch.bfloat16, torch.float16):
            rows_RD = hidden_RD.reshape(-1, hidden_RD.shape[-1])
            logits_RN: Tensor = torch.mm(rows_RD, head_ND.T, out_dtype=torch.float32)
            return logits_RN.view(*hidden_RD.shape[:-1], last - first)
        return self._ops.linear(hidden_RD, head_ND, None).float()

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        normed_TD: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        step: StepInputs,
        rows_R: Tensor | None,
    ) -> Tensor:
        """Attend, and return the projected output of these rows; None: of all."""
        ops = self._ops
        every, kept = (None, None) if step.adapters is None else (step.adapters.every, step.adapters.of(rows_R))
        qkv_TX = self._linear(index, layer, "qkv", normed_TD, every)
        q_THK = ops.rope_and_store(
            qkv_TX,
            cos_sin,
            layer.head_norms,
            self._weights.config.rms_norm_eps,
            self._cache,
            index,
            step.slot_mapping_P,
            step.tails,
        )
        out_THK = self._attention.attend(q_THK, self._cache, index, step.pages, step.tails)
        out_THK = out_THK if rows_R is None else out_THK[rows_R]
        return self._reduce(self._linear(index, layer, "output", out_THK.flatten(1), kept))

    def _feed_forward(self, index: int, layer: LayerWeights, normed_TD: Tensor, adapters: AdapterRows | None) -> Tensor:
        gate_up_TJ = self._linear(index, layer, "gate_up", normed_TD, adapters)
        return self._reduce(self._linear(index, layer, "down", self._ops.silu_mul(gate_up_TJ), adapters))

    def _linear(
        self, index: int, layer: LayerWeights, matrix: str, x_TI: Tensor, adapters: AdapterRows | None
    ) -> Tensor:
        out_TN = self._ops.linear(x_TI, *getattr(layer, matrix))
        if adapters is None or not len(adapters.segments):
            return out_TN
        assert self._slots is not None, "a step with adapters follows `use_adapters`"
        return out_TN + self._slots.change(index, matrix, x_TI, adapters)
