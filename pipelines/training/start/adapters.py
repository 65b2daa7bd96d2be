"""Trains an adapter: a frozen decoder whose projections learn a low-rank change (models.decoder.adapter)."""

import math
import shutil
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from models.decoder.adapter import ADAPTER, Adapter, LowRank, projections_of, read_adapter, save_adapter
from models.decoder.config import DecoderConfig
from models.decoder.decoder import Decoder
from models.decoder.weights import load_decoder
from pipelines.foreign.stage import copy_linked

_LEARNED = ".parametrizations.weight.0"


class _Change(nn.Module):
    """The learned change of a projection's weight."""

    def __init__(self, pair: LowRank) -> None:
        super().__init__()
        self.a_RI, self.b_NR = nn.Parameter(pair.a_RI.float()), nn.Parameter(pair.b_NR.float())
        self.scale = pair.scale

    def forward(self, weight_NI: Tensor) -> Tensor:
        """Return the weight with the change."""
        return weight_NI + self.scale * (self.b_NR @ self.a_RI)


def adapting_decoder(folder: Path, rank: int, alpha: float, seed: int) -> Decoder:
    """Return a folder's decoder, frozen, with projections that learn a change of this rank.

    The change starts from the folder's adapter, or else from 0.
    """
    decoder = load_decoder(folder, torch.float32, "cpu", with_adapter=False).requires_grad_(False)
    has_adapter = (folder / ADAPTER).is_dir()
    start = read_adapter(folder / ADAPTER, decoder.config) if has_adapter else _fresh(decoder.config, rank, alpha, seed)
    for name, pair in start.pairs.items():
        parametrize.register_parametrization(decoder.get_submodule(name), "weight", _Change(pair))
    return decoder


def learned_adapter(decoder: Decoder, base: str) -> Adapter:
    """Return the change that a decoder has learned. `base` is the version that it belongs to."""
    pairs = {
        name.removesuffix(_LEARNED): LowRank(module.a_RI.detach(), module.b_NR.detach(), module.scale)
        for name, module in decoder.named_modules()
        if isinstance(module, _Change)
    }
    return Adapter(pairs=pairs, base=base)


def with_change(decoder: Decoder) -> Decoder:
    """Return the decoder with plain weights, the learned change included."""
    with torch.device("meta"):
        plain = Decoder(decoder.config)
    modules = {name: name.rsplit(".", 1) for name in plain.state_dict()}
    weights = {name: getattr(decoder.get_submodule(module), kind).detach() for name, (module, kind) in modules.items()}
    plain.load_state_dict(weights, assign=True)
    return plain.eval()


def save_adapted(adapter: Adapter, config: DecoderConfig, base: Path, out: Path) -> None:
    """Write a decoder's folder: links to the base's files, and the adapter."""
    copy_linked(base, out)
    shutil.rmtree(out / ADAPTER, ignore_errors=True)
    save_adapter(adapter, config, out / ADAPTER)


def _fresh(config: DecoderConfig, rank: int, alpha: float, seed: int) -> Adapter:
    """Return PEFT's initial adapter, whose change is 0: A is uniform, B is 0."""
    draw = torch.Generator().manual_seed(seed)
    pairs = {}
    for layer in range(config.num_hidden_layers):
        for row in projections_of(config):
            bound = 1 / math.sqrt(row.columns(config))
            a_RI = (2 * torch.rand(rank, row.columns(config), generator=draw) - 1) * bound
            pairs[f"layers.{layer}.{row.name}"] = LowRank(a_RI, torch.zeros(row.rows(config), rank), alpha / rank)
    return Adapter(pairs=pairs)
