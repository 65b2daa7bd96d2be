"""The forward pass of a CPU with a compiler: a step through all layers is one call into the compiled library.

For fp32 and bf16, keys and values in the model's dtype. What it computes is what `LayerLoop` does over `TorchKernels`, to
rounding. It knows no requests.

Shape suffixes: T rows of the step, R rows, D hidden, K head size, P = K / 2 pairs.
"""

import ctypes

import numpy as np
import torch
from torch import Tensor

from models.decoder.rope import periods
from services.llm.engine.config import WeightKind
from services.llm.engine.cpu.huge_pages import use_huge_pages
from services.llm.engine.cpu.library import Layer, Library, Matrix, Model, Step
from services.llm.engine.cpu.pages import CpuPages, lay_out
from services.llm.engine.cpu.quantised import quantise
from services.llm.engine.forward.layers import StepInputs
from services.llm.engine.forward.weights import LayerWeights, Weights
from services.llm.engine.kv.cache import KvCache
from services.llm.engine.schedule.plan import StepPlan


class CpuForward:
    """One decoder and its KV cache. Owns int8 copies of the layers' matrices where `weight_kind` asks for them."""

    def __init__(self, library: Library, weights: Weights, cache: KvCache, weight_kind: WeightKind) -> None:
        config = weights.config
        self._library = library
        self._config = config
        self._cache = cache
        self._head_VD = weights.head_VD
        self._kept: list[Tensor] = []
        self._model = self._describe(weights, is_int8=weight_kind == "int8")
        use_huge_pages((*self._kept, self._head_VD))
        self._is_windowed = np.array(
            [config.window_of(layer) is not None for layer in range(config.num_hidden_layers)], dtype=np.uint8
        )

    def prepare(self, plan: StepPlan) -> CpuPages:
        """Lay out which rows of a step see which pages."""
        return lay_out(plan, self._cache.block_tokens, self._config.window)

    def hidden(self, step: StepInputs) -> Tensor:
        """Embed, run all layers, norm."""
        pages: CpuPages = step.pages
        hidden_TD = torch.empty(len(step.tokens_T), self._config.hidden_size, dtype=self._head_VD.dtype)
        keys, values = self._cache.slots(0).keys, self._cache.slots(0).values
        asked = Step(
            rows=len(step.tokens_T),
            paged_rows=len(step.slots_P),
            num_tiles=len(pages.tiles_E),
            tokens=step.tokens_T.data_ptr(),
            positions=step.positions_T.data_ptr(),
            slots=step.slots_P.data_ptr(),
            blocks=pages.blocks_N.ctypes.data,
            tiles=pages.tiles_E.ctypes.data,
            windowed_tiles=None if pages.windowed_E is None else pages.windowed_E.ctypes.data,
            is_windowed=self._is_windowed.ctypes.data,
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            layer_slots=len(keys),
            block_tokens=self._cache.block_tokens,
            hidden=hidden_TD.data_ptr(),
        )
        if step.tails is not None:
            asked.tail_keys = step.tails.keys_YBLGK.data_ptr()
            asked.tail_values = step.tails.values_YBLGK.data_ptr()
            asked.tail_places = step.tails.place_B.data_ptr()
            asked.tail_seen = step.tails.seen_BL.data_ptr()
            asked.num_tail_places = step.tails.keys_YBLGK.shape[2]
        self._library.forward(self._model, asked)
        return hidden_TD

    def logits(self, hidden_RD: Tensor, first: int, last: int) -> Tensor:
        """Multiply by these rows of the head, which always is in the model's dtype."""
        rows_RD = hidden_RD.reshape(-1, hidden_RD.shape[-1]).contiguous()
        return self._library.score(rows_RD, self._head_VD[first:last]).view(*hidden_RD.shape[:-1], last - first)

    def _describe(self, weights: Weights, *, is_int8: bool) -> Model:
        config = weights.config
        layers = (Layer * len(weights.layers))(*(self._layer(layer, is_int8) for layer in weights.layers))
        return Model(
            is_bf16=weights.head_VD.dtype is torch.bfloat16,
            is_int8=is_int8,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            groups=config.num_key_value_heads,
            head_dim=config.head_dim,
            ffn=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            eps=config.rms_norm_eps,
            strength=1.0 if config.rope.scaling is None else config.rope.scaling.attention_factor,
            layers=ctypes.cast(layers, ctypes.POINTER(Layer)),
            embedding=self._address(weights.embedding_VD),
            norm=self._address(weights.norm_D),
            periods=self._address(periods(config.head_dim, config.rope, weights.head_VD.device)),
        )

    def _layer(self, layer: LayerWeights, is_int8: bool) -> Layer:
        norms = layer.head_norms
        return Layer(
            attention_norm=self._address(layer.attention_norm_D),
            query_norm=None if norms is None else self._address(norms.query_K),
            key_norm=None if norms is None else self._address(norms.key_K),
            ffn_norm=self._address(layer.ffn_norm_D),
            qkv=self._matrix(layer.qkv_XD, layer.qkv_bias_X, is_int8),
            output=self._matrix(layer.output_DA, layer.output_bias_D, is_int8),
            gate_up=self._matrix(layer.gate_up_JD, layer.gate_up_bias_J, is_int8),
            down=self._matrix(layer.down_DF, layer.down_bias_D, is_int8),
        )

    def _matrix(self, weight: Tensor, bias: Tensor | None, is_int8: bool) -> Matrix:
        biased = None if bias is None else self._address(bias)
        if not is_int8:
            return Matrix(self._address(weight), biased)
        coded = quantise(weight)
        return Matrix(self._address(coded.code_NJ), biased, self._address(coded.scale_N), self._address(coded.sum_N))

    def _address(self, tensor: Tensor) -> int:
        """Keep a tensor alive for as long as the library reads it, and tell where it lies."""
        whole = tensor.contiguous()
        self._kept.append(whole)
        return whole.data_ptr()
