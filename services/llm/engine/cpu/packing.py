"""A decoder's weights in the layout that the compiled library reads: structs of addresses, and int8 copies where configured.

int8 is symmetric with one scale per row, rounded to the nearest of -127 to 127, so that VNNI multiplies it and half of bf16's
bytes are read. Activations are quantised by the library, row by row.

Shape suffixes: N and I out and in of a matrix, J = I rounded up to a multiple of 64.
"""

import ctypes

import torch
from torch import Tensor
from torch.nn import functional

from models.decoder.layer import MATRICES, NORMS
from models.decoder.rope import periods
from services.llm.engine.config import WeightKind
from services.llm.engine.cpu.library import LayerStruct, MatrixStruct, ModelStruct
from services.llm.engine.forward.weights import LayerWeights, Weights

_VECTOR = 64


class PackedModel:
    """Owns every tensor that `struct` points to; int8 copies replace the layers' matrices if `weight_kind` is int8."""

    def __init__(self, weights: Weights, weight_kind: WeightKind) -> None:
        self.tensors: list[Tensor] = []
        self._is_int8 = weight_kind == "int8"
        config = weights.config
        layers = (LayerStruct * len(weights.layers))(*(self._layer(layer) for layer in weights.layers))
        self.struct = ModelStruct(
            is_bf16=weights.head_VD.dtype is torch.bfloat16,
            is_int8=self._is_int8,
            hidden=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            ffn=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            eps=config.rms_norm_eps,
            rope_scale=1.0 if config.rope.scaling is None else config.rope.scaling.attention_factor,
            layers=ctypes.cast(layers, ctypes.POINTER(LayerStruct)),
            embedding=self._address(weights.embedding_VD),
            norm=self._address(weights.norm_D),
            periods=self._address(periods(config.head_dim, config.rope, weights.head_VD.device)),
        )

    def _layer(self, layer: LayerWeights) -> LayerStruct:
        norms = {name: getattr(layer, name) for name in NORMS}
        return LayerStruct(
            **{name: None if norm is None else self._address(norm) for name, norm in norms.items()},
            **{name: self._matrix(*getattr(layer, name)) for name in MATRICES},
        )

    def _matrix(self, weight_NI: Tensor, bias_N: Tensor | None) -> MatrixStruct:
        bias = None if bias_N is None else self._address(bias_N)
        if not self._is_int8:
            return MatrixStruct(self._address(weight_NI), bias)
        code_NJ, scale_N, sum_N = quantise(weight_NI)
        return MatrixStruct(self._address(code_NJ), bias, self._address(scale_N), self._address(sum_N))

    def _address(self, tensor: Tensor) -> int:
        """Keep a tensor alive and return the address of its contiguous data."""
        whole = tensor.contiguous()
        self.tensors.append(whole)
        return whole.data_ptr()


def quantise(weight_NI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise a matrix to int8: weight = code * scale of its row.

    Returns:
        The codes (N, J), rows padded with zeros to whole vectors; the scales (N,) fp32; and each row's sum of codes (N,) int32,
        by which the library corrects for the offset of its unsigned activations.
    """
    scale_N = (weight_NI.float().abs().amax(1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    code_NI = (weight_NI.float() / scale_N.unsqueeze(1)).round().to(torch.int8)
    code_NJ = functional.pad(code_NI, (0, -code_NI.shape[1] % _VECTOR)).contiguous()
    return code_NJ, scale_N.contiguous(), code_NJ.sum(1, dtype=torch.int32)
