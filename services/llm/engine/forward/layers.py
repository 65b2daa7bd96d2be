"""A step through the decoder, from tokens to hidden states: the layers' loop over joined weights and fused kernels.

The rows of all requests lie flat: the chunks' tokens, whose keys and values go to the paged cache, then the beams, whose
go to their tails. The loop makes no copy to the host and no decision that depends on data, so a graph can record it
over inputs that stay in place. It knows no requests and no items.

Shape suffixes: T rows of the step, P rows that go to the paged cache, B beams, D hidden, V vocabulary, R rows, H query heads,
G key/value heads, K head size, L places of a tail, Y layers.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from models.decoder.rope import rotary_angles
from services.llm.engine.beam.tails import Tails
from services.llm.engine.forward.attention import PagedAttention
from services.llm.engine.forward.ops import Kernels
from services.llm.engine.forward.regular import RegularRows
from services.llm.engine.forward.weights import LayerWeights, Weights
from services.llm.engine.kv.cache import KvCache
from services.llm.engine.schedule.plan import StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """One step's tensors. `pages` is what the attention's `prepare` laid out."""

    tokens_T: Tensor
    positions_T: Tensor
    slots_P: Tensor
    pages: Any
    tails: Tails | None


class Forward(Protocol):
    """The decoder as the runner sees it."""

    def prepare(self, plan: StepPlan) -> Any:
        """Lay out which rows of a step see which pages."""
        ...

    def hidden(self, step: StepInputs) -> Tensor:
        """Return the hidden states (T, D) after the final norm; keys and values are stored on the way."""
        ...

    def logits(self, hidden_RD: Tensor, first: int, last: int) -> Tensor:
        """Score the tokens `first` to `last` - 1 of the vocabulary, fp32. (..., D) -> (..., last - first)."""
        ...


class LayerLoop:
    """Runs one layer after another in Python, on any device."""

    def __init__(self, weights: Weights, cache: KvCache, kernels: Kernels, attention: PagedAttention[Any]) -> None:
        self._weights = weights
        self._cache = cache
        self._kernels = kernels
        self._attention = attention

    def prepare(self, plan: StepPlan) -> Any:
        """Lay out pages as this attention reads them."""
        return self._attention.prepare(plan)

    def prepare_regular(self, rows: RegularRows) -> Any:
        """Lay out the pages of a step of one fixed shape, on the device alone."""
        return self._attention.prepare_regular(rows)

    def hidden(self, step: StepInputs) -> Tensor:
        """Embed, run all layers, norm."""
        weights, kernels, eps = self._weights, self._kernels, self._weights.config.rms_norm_eps
        residual_TD = weights.embedding_VD[step.tokens_T]
        turns = rotary_angles(step.positions_T, weights.config.head_dim, weights.config.rope, residual_TD.dtype)
        normed_TD = kernels.rms_norm(residual_TD, weights.layers[0].attention_norm_D, eps)
        following = [*(layer.attention_norm_D for layer in weights.layers[1:]), weights.norm_D]
        for index, (layer, next_norm_D) in enumerate(zip(weights.layers, following, strict=True)):
            attended_TD = self._attend(index, layer, normed_TD, turns, step)
            normed_TD, residual_TD = kernels.add_rms_norm(attended_TD, residual_TD, layer.ffn_norm_D, eps)
            fed_TD = self._feed_forward(layer, normed_TD)
            normed_TD, residual_TD = kernels.add_rms_norm(fed_TD, residual_TD, next_norm_D, eps)
        return normed_TD

    def logits(self, hidden_RD: Tensor, first: int, last: int) -> Tensor:
        """Multiply by these rows of the head."""
        return self._kernels.linear(hidden_RD, self._weights.head_VD[first:last], None).float()

    def _attend(
        self, index: int, layer: LayerWeights, normed_TD: Tensor, turns: tuple[Tensor, Tensor], step: StepInputs
    ) -> Tensor:
        kernels = self._kernels
        qkv_TX = kernels.linear(normed_TD, layer.qkv_XD, layer.qkv_bias_X)
        heads = kernels.rope_and_store(
            qkv_TX, turns, layer.head_norms, self._weights.config.rms_norm_eps, self._cache, index, step.slots_P
        )
        if step.tails is not None:
            num_paged = len(step.slots_P)
            step.tails.write(index, heads.k_TGK[num_paged:], heads.v_TGK[num_paged:])
        out_THK = self._attention.attend(heads.q_THK, self._cache, index, step.pages, step.tails)
        return kernels.linear(out_THK.flatten(1), layer.output_DA, layer.output_bias_D)

    def _feed_forward(self, layer: LayerWeights, normed_TD: Tensor) -> Tensor:
        gate_up_TJ = self._kernels.linear(normed_TD, layer.gate_up_JD, layer.gate_up_bias_J)
        return self._kernels.linear(self._kernels.silu_mul(gate_up_TJ), layer.down_DF, layer.down_bias_D)
