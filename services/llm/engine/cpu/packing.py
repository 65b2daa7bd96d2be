"""A decoder's weights in the layout that the compiled library reads: structs of addresses, in huge pages.

If configured, matrices have 8 or 4 bits (`quantise.py`), so that fewer bytes are read, and the embedding and the head
have 8. The library quantises activations row by row.

Shape suffixes: N and I out and in of a matrix, V vocabulary, D hidden.
"""

import ctypes
import sys
from collections.abc import Iterable

import torch
from torch import Tensor

from models.decoder.layer import MATRICES, NORMS
from models.decoder.rope import periods
from services.llm.engine.config import MATRIX_BITS, TABLE_BITS, WeightKind
from services.llm.engine.cpu.library import (
    LayerSlotsStruct,
    LayerStruct,
    Library,
    MatrixStruct,
    ModelStruct,
    SlotsStruct,
)
from services.llm.engine.cpu.quantise import check_shape, quantise
from services.llm.engine.forward.adapters import AdapterSlots
from services.llm.engine.forward.weights import DecoderWeights, LayerWeights, Linear, num_bytes

_PAGE_BYTES = 2 * 2**20
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25


class PackedModel:
    """Owns every tensor that its structs point to; copies, quantised as `weight_kind` says, replace the matrices.

    The layers' matrices of 8 bits and more are packed, if the library can.

    Raises ConfigError naming the field if the decoder's shape does not fit that kind.
    """

    def __init__(self, library: Library, weights: DecoderWeights, weight_kind: WeightKind) -> None:
        config = weights.config
        check_shape(config, weight_kind)
        self.tensors: list[Tensor] = []
        self._library = library
        self._matrix_bits, table_bits = MATRIX_BITS[weight_kind], TABLE_BITS[weight_kind]
        layers = (LayerStruct * len(weights.layers))(*(self._layer(layer) for layer in weights.layers))
        embedding = self._matrix(Linear(weights.embedding_VD, None), table_bits)
        is_tied = weights.head_VD.data_ptr() == weights.embedding_VD.data_ptr()
        self.head = embedding if is_tied else self._matrix(Linear(weights.head_VD, None), table_bits)
        """The output matrix."""
        self.struct = ModelStruct(
            is_bf16=weights.head_VD.dtype is torch.bfloat16,
            is_quantised=self._matrix_bits is not None,
            hidden=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            ffn=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            eps=config.rms_norm_eps,
            rope_scale=1.0 if config.rope.scaling is None else config.rope.scaling.attention_factor,
            layers=ctypes.cast(layers, ctypes.POINTER(LayerStruct)),
            embedding=embedding,
            norm=self._address(weights.norm_D),
            periods=self._address(periods(config.head_dim, config.rope, weights.head_VD.device)),
        )

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.tensors)

    def _layer(self, layer: LayerWeights) -> LayerStruct:
        norms = {name: getattr(layer, name) for name in NORMS}
        return LayerStruct(
            **{name: None if norm is None else self._address(norm) for name, norm in norms.items()},
            **{
                name: self._matrix(getattr(layer, name), self._matrix_bits, parts=2 if name == "gate_up" else 1)
                for name in MATRICES
            },
        )

    def _matrix(self, linear: Linear, bits: int | None, parts: int = 0) -> MatrixStruct:
        """Return a matrix in its kind of weights; packed, if it can be, in `parts` equal parts unless these are 0."""
        weight_NI, bias_N = linear
        struct = MatrixStruct(bias=None if bias_N is None else self._address(bias_N))
        stored = weight_NI.contiguous()
        if bits is not None:
            rows = quantise(weight_NI, bits)
            stored, struct.scales, struct.sums = rows.codes, self._address(rows.scale_N), self._address(rows.sum_N)
            struct.multipliers = None if rows.multiplier_NG is None else self._address(rows.multiplier_NG)
        if parts and bits != 4 and self._library.packs and stored.shape[1] * stored.element_size() % 4 == 0:
            struct.strips = self._address(self._library.pack(stored, parts))
        else:
            struct.weight = self._address(stored)
        return struct

    def _address(self, tensor: Tensor) -> int:
        """Keep a tensor alive and return the address of its contiguous data."""
        whole = tensor.contiguous()
        self.tensors.append(whole)
        return whole.data_ptr()


def pack_slots(slots: AdapterSlots) -> "ctypes.Array[LayerSlotsStruct]":
    """Return the addresses of the adapters' slots by layer; the slots keep their memory alive."""
    layers = (
        LayerSlotsStruct(
            **{name: SlotsStruct(pair.down_SPRI.data_ptr(), pair.up_SRN.data_ptr()) for name, pair in layer.items()}
        )
        for layer in slots.layers
    )
    return (LayerSlotsStruct * len(slots.layers))(*layers)


def use_huge_pages(tensors: Iterable[Tensor]) -> None:
    """Convert the memory of contiguous tensors to 2 MB pages (Linux).

    Addresses and contents do not change; never raises. A step reads all weights. With 4 kB pages each page costs a page
    table walk, nested in a virtual machine, and the hardware prefetcher stops at the end of the page. `MADV_HUGEPAGE`
    and `MADV_COLLAPSE` (Linux 6.1) convert existing pages immediately; older kernels do it in the background.
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
