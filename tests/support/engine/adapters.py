"""Builders of random adapters, and decoders with an adapter merged into their weights."""

import copy

import torch

from models.decoder.adapter import Adapter, LowRank, merge_adapter, projections_of
from models.decoder.decoder import Decoder


def build_adapter(decoder: Decoder, rank: int, seed: int, targets: tuple[str, ...] = ()) -> Adapter:
    """Build an adapter of these projections, of all by default, that changes the decoder's output visibly."""
    draw = torch.Generator().manual_seed(seed)
    pairs = {
        f"layers.{layer}.{row.name}": LowRank(
            torch.randn(rank, row.columns(decoder.config), generator=draw) / row.columns(decoder.config) ** 0.5,
            torch.randn(row.rows(decoder.config), rank, generator=draw) / rank**0.5,
            0.2,
        )
        for layer in range(decoder.config.num_hidden_layers)
        for row in projections_of(decoder.config)
        if not targets or row.name in targets
    }
    return Adapter(pairs=pairs, base="base")


def merged(decoder: Decoder, adapter: Adapter | None) -> Decoder:
    """Return a copy of the decoder with the adapter in its weights."""
    copied = copy.deepcopy(decoder)
    if adapter is not None:
        merge_adapter(copied, adapter)
    return copied
