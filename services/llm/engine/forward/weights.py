"""A decoder's weights in the format of the engine's forward pass: projections joined by the table in `layer.py`.

The decoder's own parameters become views of the joined matrices, so memory does not double and the decoder still works.
The module does not know kernels.

Shape suffixes: D hidden, K head size, V vocabulary, N and I out and in of a matrix.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.decoder.config import DecoderConfig
from models.decoder.decoder import Decoder, DecoderLayer
from models.decoder.layer import MATRICES, NORMS


class Linear(NamedTuple):
    """A matrix (out, in), as in torch's linear, and its bias, None if the family has no bias."""

    weight_NI: Tensor
    bias_N: Tensor | None


class HeadNorms(NamedTuple):
    """The norms of each query and key head before rope (Qwen3)."""

    query_K: Tensor
    key_K: Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LayerWeights:
    """One layer: the norms and joined matrices of the table, by name."""

    attention_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    ffn_norm: Tensor
    qkv: Linear
    output: Linear
    gate_up: Linear
    down: Linear

    @property
    def head_norms(self) -> HeadNorms | None:
        """The norms of query and key heads, None if the family has none."""
        if self.query_norm is None or self.key_norm is None:
            return None
        return HeadNorms(self.query_norm, self.key_norm)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DecoderWeights:
    """All layers, the embedding, the final norm and the output matrix (which may be the embedding)."""

    config: DecoderConfig
    embedding_VD: Tensor
    layers: tuple[LayerWeights, ...]
    norm_D: Tensor
    head_VD: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, counting a tied head once."""
        linears = [getattr(layer, name) for layer in self.layers for name in MATRICES]
        norms = [getattr(layer, name) for layer in self.layers for name in NORMS]
        return num_bytes(
            [self.embedding_VD, self.norm_D, self.head_VD, *(tensor for linear in linears for tensor in linear), *norms]
        )


def num_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes of these tensors, counting tensors at the same address once."""
    return sum(
        {tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None}.values()
    )


@torch.inference_mode(mode=False)
def join_weights(decoder: Decoder) -> DecoderWeights:
    """Join a decoder's matrices; reuse the matrices that an earlier engine has joined."""
    return DecoderWeights(
        config=decoder.config,
        embedding_VD=decoder.embedding.weight.detach(),
        layers=tuple(_join_layer(layer) for layer in decoder.layers if isinstance(layer, DecoderLayer)),
        norm_D=decoder.norm.weight.detach(),
        head_VD=decoder.head_weight_VD.detach(),
    )


def _join_layer(layer: DecoderLayer) -> LayerWeights:
    parameters = dict(layer.named_parameters())
    joined: dict[str, Any] = dict.fromkeys(NORMS)  # absent norms
    joined |= {name: parameters[f"{name}.weight"].detach() for name in NORMS if name in layer}
    for matrix, rows in MATRICES.items():
        weights = [parameters[f"{row.name}.weight"] for row in rows]
        joined[matrix] = _join(weights, [parameters.get(f"{row.name}.bias") for row in rows])
    return LayerWeights(**joined)


def _join(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Linear:
    present = [bias for bias in biases if bias is not None]
    return Linear(_join_rows(weights), _join_rows(present) if present else None)


def _join_rows(parts: Sequence[Tensor]) -> Tensor:
    """Return the parameters joined along their rows in one memory block; each parameter becomes a view of it."""
    first = parts[0].detach()
    shape = (sum(len(part) for part in parts), *first.shape[1:])
    if _is_joined(parts):
        return first.as_strided(shape, first.stride())
    joined = torch.cat([part.detach() for part in parts])
    for part, view in zip(parts, torch.split(joined, [len(part) for part in parts]), strict=True):
        part.data = view
    return joined


def _is_joined(parts: Sequence[Tensor]) -> bool:
    ends = [part.data_ptr() + part.numel() * part.element_size() for part in parts]
    is_one = len({part.untyped_storage().data_ptr() for part in parts}) == 1
    starts = [part.data_ptr() for part in parts[1:]]
    return is_one and all(part.is_contiguous() for part in parts) and ends[:-1] == starts
