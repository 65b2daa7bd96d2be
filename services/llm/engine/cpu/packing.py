"""A decoder's weights in the layout that the compiled library reads: structs of addresses, in huge pages.

Where configured, matrices are int8: symmetric with one scale per row, rounded to the nearest of -127 to 127, so that VNNI multiplies
them and half of bf16's bytes are read. Activations are quantised by the library, row by row.

Shape suffixes: N and I out and in of a matrix, J = I rounded up to a multiple of 64.
"""

import ctypes
import sys
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional

from models.decoder.layer import MATRICES, NORMS
from models.decoder.rope import periods
from services.llm.engine.config import WeightKind
from services.llm.engine.cpu.library import LayerStruct, MatrixStruct, ModelStruct
from services.llm.engine.forward.weights import LayerWeights, Weights

_VECTOR = 64
_PAGE_BYTES = 2 * 2**20
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25


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


def use_huge_pages(tensors: Iterable[Tensor]) -> None:
    """Convert the memory of contiguous tensors to 2 MB pages (Linux). Addresses and contents do not change; never an error.

    A step reads all weights. With 4 kB pages each page costs a page table walk, nested in a virtual machine, and the hardware
    prefetcher stops at its end. `MADV_HUGEPAGE` and `MADV_COLLAPSE` (Linux 6.1) convert existing pages at once; older kernels do it
    in the background.
    """
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for first, last in _whole_pages(sorted(_extent(tensor) for tensor in tensors)):
        for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
            madvise(first, last - first, advice)


def _extent(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


def _whole_pages(extents: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join extents less than a page apart and return the whole pages inside them."""
    joined: list[tuple[int, int]] = []
    for first, last in extents:
        if joined and first - joined[-1][1] < _PAGE_BYTES:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    whole = [(-(-first // _PAGE_BYTES) * _PAGE_BYTES, last // _PAGE_BYTES * _PAGE_BYTES) for first, last in joined]
    return [(first, last) for first, last in whole if first < last]
