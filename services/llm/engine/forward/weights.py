"""A decoder's weights as the engine's forward pass reads them: query, key and value as one matrix, gate and up as one.

The decoder's own parameters become views of the joined matrices, so that memory does not double and the decoder goes on
working. It knows no kernels.

Shape suffixes: D hidden, K head size, A = H * K query width, X = (H + 2 G) * K query, key and value width, F feed-forward,
J = 2 F gate and up width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.decoder.decoder import Decoder, DecoderConfig, Layer


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorms:
    """What each query and key head is normalised by before it is turned (Qwen3)."""

    query_K: Tensor
    key_K: Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LayerWeights:
    """One layer. A matrix is (out, in), as torch's linear takes it; biases are None where the family has none."""

    attention_norm_D: Tensor
    qkv_XD: Tensor
    qkv_bias_X: Tensor | None
    head_norms: HeadNorms | None
    output_DA: Tensor
    output_bias_D: Tensor | None
    ffn_norm_D: Tensor
    gate_up_JD: Tensor
    gate_up_bias_J: Tensor | None
    down_DF: Tensor
    down_bias_D: Tensor | None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Weights:
    """All layers, the embedding, the final norm and the output head (which may be the embedding)."""

    config: DecoderConfig
    embedding_VD: Tensor
    layers: tuple[LayerWeights, ...]
    norm_D: Tensor
    head_VD: Tensor


@torch.inference_mode(mode=False)
def join_weights(decoder: Decoder) -> Weights:
    """Join a decoder's matrices, or find them joined by an engine before."""
    return Weights(
        config=decoder.config,
        embedding_VD=decoder.model.embed_tokens.weight.detach(),
        layers=tuple(_join_layer(layer, decoder.config) for layer in decoder.model.layers if isinstance(layer, Layer)),
        norm_D=decoder.model.norm.weight.detach(),
        head_VD=decoder.head_weight_VD.detach(),
    )


def _join_layer(layer: Layer, config: DecoderConfig) -> LayerWeights:
    attention, ffn = layer.self_attn, layer.mlp
    qkv, qkv_bias = _join(attention.q_proj, attention.k_proj, attention.v_proj)
    gate_up, gate_up_bias = _join(ffn.gate_proj, ffn.up_proj)
    norms = None
    if config.qk_norm:
        norms = HeadNorms(attention.q_norm.weight.detach(), attention.k_norm.weight.detach())
    return LayerWeights(
        attention_norm_D=layer.input_layernorm.weight.detach(),
        qkv_XD=qkv,
        qkv_bias_X=qkv_bias,
        head_norms=norms,
        output_DA=attention.o_proj.weight.detach(),
        output_bias_D=_bias(attention.o_proj),
        ffn_norm_D=layer.post_attention_layernorm.weight.detach(),
        gate_up_JD=gate_up,
        gate_up_bias_J=gate_up_bias,
        down_DF=ffn.down_proj.weight.detach(),
        down_bias_D=_bias(ffn.down_proj),
    )


def _join(*parts: nn.Linear) -> tuple[Tensor, Tensor | None]:
    bias = None if parts[0].bias is None else _join_rows([part.bias for part in parts])
    return _join_rows([part.weight for part in parts]), bias


def _join_rows(parts: Sequence[Tensor]) -> Tensor:
    """Lay parameters one after another in memory and make each a view of its place there."""
    first = parts[0].detach()
    shape = (sum(len(part) for part in parts), *first.shape[1:])
    if _lie_joined(parts):
        return first.as_strided(shape, first.stride())
    joined = torch.cat([part.detach() for part in parts])
    for part, view in zip(parts, torch.split(joined, [len(part) for part in parts]), strict=True):
        part.data = view
    return joined


def _lie_joined(parts: Sequence[Tensor]) -> bool:
    ends = [part.data_ptr() + part.numel() * part.element_size() for part in parts]
    is_one = len({part.untyped_storage().data_ptr() for part in parts}) == 1
    starts = [part.data_ptr() for part in parts[1:]]
    return is_one and all(part.is_contiguous() for part in parts) and ends[:-1] == starts


def _bias(linear: nn.Linear) -> Tensor | None:
    return None if linear.bias is None else linear.bias.detach()
