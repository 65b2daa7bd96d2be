"""Structured pruning: removes feed-forward channels or heads from every layer.

The result is an ordinary, smaller decoder.

A channel's importance is its contribution to the residual stream over the training histories: its mean square times the
squared norm of its column. The rows and columns to remove with it are derived from the table in
`models/decoder/layer.py`, by how shapes change with the config; Hugging Face can still read the config, so every layer
keeps the same number. Grouped query heads are removed with their key/value head.

Shape suffixes: N and I out and in of a matrix, C channels, G groups of heads, K head size.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from models.catalogue import BOS_TOKEN, Catalogue
from models.decoder.config import DecoderConfig
from models.decoder.decoder import Decoder, DecoderLayer
from models.decoder.layer import Projection, rows_of
from models.prompt import Prompt
from pipelines.scoring.dense import hidden_states, right_padded

_BATCH = 32


def without_channels(
    decoder: Decoder, catalogue: Catalogue, histories: Sequence[np.ndarray], kept_share: float, stride: int
) -> Decoder:
    """Return the decoder with this fraction of each layer's feed-forward channels.

    Their number is a multiple of 64 if there are enough.
    """
    before = decoder.config
    unit = 64 if before.intermediate_size >= 128 else 1
    after = replace(before, intermediate_size=max(unit, round(before.intermediate_size * kept_share / unit) * unit))
    energy = _energies(decoder, "down", catalogue, histories, stride)
    kept = [_largest(channel_energy, after.intermediate_size) for channel_energy in energy]
    return _cut(decoder, after, [{before.intermediate_size: channels} for channels in kept])


def without_heads(
    decoder: Decoder, catalogue: Catalogue, histories: Sequence[np.ndarray], kept_share: float, stride: int
) -> Decoder:
    """Return the decoder with this fraction of each layer's heads, in whole groups of a key/value head.

    Removes at least one group.
    """
    before = decoder.config
    groups, per_group = before.num_key_value_heads, before.num_attention_heads // before.num_key_value_heads
    num_kept = max(1, min(groups - 1, round(groups * kept_share)))
    after = replace(before, num_key_value_heads=num_kept, num_attention_heads=num_kept * per_group)
    widths = per_group * before.head_dim, before.head_dim
    kept = []
    for energy_C in _energies(decoder, "output", catalogue, histories, stride):
        chosen_G = _largest(energy_C.view(groups, -1).sum(1), num_kept)
        query, key = ((chosen_G[:, None] * width + torch.arange(width)).flatten() for width in widths)
        kept.append({groups * widths[0]: query, groups * widths[1]: key})
    return _cut(decoder, after, kept)


def _cut(decoder: Decoder, after: DecoderConfig, kept: Sequence[dict[int, Tensor]]) -> Decoder:
    """Return a decoder of this config with another's weights; `kept` maps a width to each layer's kept channels."""
    smaller, before = Decoder(after), decoder.config
    weights = decoder.state_dict()
    for index, channels in enumerate(kept):
        for row in rows_of(before):
            if not isinstance(row, Projection):
                continue
            for kind in ("weight", "bias"):
                name = f"layers.{index}.{row.name}.{kind}"
                if name not in weights:
                    continue
                if row.rows(before) != row.rows(after):
                    weights[name] = weights[name][channels[row.rows(before)]]
                if kind == "weight" and row.columns(before) != row.columns(after):
                    weights[name] = weights[name][:, channels[row.columns(before)]]
    smaller.load_state_dict(weights)
    return smaller.eval()


def _largest(energy: Tensor, count: int) -> Tensor:
    """Return the positions of the largest values, ascending."""
    return energy.topk(count).indices.sort().values


@torch.inference_mode()
def _energies(
    decoder: Decoder, name: str, catalogue: Catalogue, histories: Sequence[np.ndarray], stride: int
) -> list[Tensor]:
    """Return, by layer, the contribution of each input channel of the projection `name` to the residual stream."""
    projections = [layer[name] for layer in decoder.layers if isinstance(layer, DecoderLayer)]
    with _mean_squares(projections) as sums:
        longest = decoder.config.max_position_embeddings // catalogue.depth - 1
        prompt = Prompt(longest, stride)
        prompts = [prompt.tokens(catalogue, history.tolist()) for history in histories]
        for start in range(0, len(prompts), _BATCH):
            tokens_BL, _ = right_padded(prompts[start : start + _BATCH], BOS_TOKEN, decoder.embedding.weight.device)
            hidden_states(decoder, tokens_BL)
    weights = [dict(projection.named_parameters())["weight"] for projection in projections]
    return [square * weight.pow(2).sum(0) for square, weight in zip(sums, weights, strict=True)]


@contextmanager
def _mean_squares(modules: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Accumulate the sums of squares of these modules' inputs by channel inside this block."""
    sums = [torch.zeros(()) for _ in modules]

    def add(index: int, _module: nn.Module, inputs: tuple[Tensor]) -> None:
        sums[index] = sums[index] + inputs[0].flatten(0, -2).pow(2).sum(0)

    hooks = [module.register_forward_pre_hook(partial(add, index)) for index, module in enumerate(modules)]
    try:
        yield sums
    finally:
        for hook in hooks:
            hook.remove()
