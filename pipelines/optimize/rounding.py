"""Training with the engine's arithmetic: inside `engine_numbers`, weights and activations are rounded as in serving.

The gradient passes the rounding unchanged (the straight-through estimator of Bengio, Léonard and Courville 2013,
arXiv:1308.3432). torchao's fake quantisers are not used: their groups have real scales, while the engine's have integer
multipliers of the row's scale, so a decoder trained with torchao's would serve with other numbers. The rounding itself
is the engine's own function.

Weights are rounded as bf16 stores them, and stay so: an engine in bf16 and one in fp32 then have the same codes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from models.decoder.decoder import Decoder
from services.llm.engine.config import MATRIX_BITS, TABLE_BITS, WeightKind
from services.llm.engine.cpu.quantise import rounded


class RoundedWeight(nn.Module):
    """A weight as an engine of a kind stores it, for torch's parametrisations."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits

    def forward(self, weight: Tensor) -> Tensor:
        """Return the rounded weight; its gradient is the weight's."""
        return weight + (rounded(weight.detach().bfloat16().float(), self.bits) - weight).detach()


@contextmanager
def engine_numbers(decoder: Decoder, weight_kind: WeightKind) -> Iterator[None]:
    """Compute with the numbers of an engine of this kind inside this block; the original weights return in bf16."""
    matrix_bits, table_bits = MATRIX_BITS[weight_kind], TABLE_BITS[weight_kind]
    matrices = [module for module in decoder.layers.modules() if isinstance(module, nn.Linear)]
    tables = [decoder.embedding] if decoder.config.tie_word_embeddings else [decoder.embedding, decoder.head]
    rounding = [(module, matrix_bits) for module in matrices] + [(module, table_bits) for module in tables]
    hooks = [module.register_forward_pre_hook(_round_input) for module in matrices if matrix_bits is not None]
    if table_bits is not None:
        hooks.append(decoder.norm.register_forward_hook(lambda _module, _inputs, output: _rounded_rows(output)))
    changed = [(module, bits) for module, bits in rounding if bits is not None]
    for module, bits in changed:
        parametrize.register_parametrization(module, "weight", RoundedWeight(bits))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, _ in changed:
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)
            with torch.no_grad():
                weight = cast("nn.Parameter", module.weight)
                weight.copy_(weight.bfloat16())


def as_served(decoder: Decoder) -> Decoder:
    """Return a plain decoder with the rounded weights, sharing all other weights."""
    with torch.device("meta"):
        plain = Decoder(decoder.config)
    weights = {}
    for name in plain.state_dict():
        module, _, kind = name.rpartition(".")
        weights[name] = getattr(decoder.get_submodule(module), kind).detach()
    plain.load_state_dict(weights, assign=True)
    return plain


def _round_input(_module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (_rounded_rows(inputs[0]),)


def _rounded_rows(rows: Tensor) -> Tensor:
    """Return activations in 8 bits, one scale per row, as the library rounds them."""
    with torch.no_grad():
        step = (rows.abs().amax(-1, keepdim=True) / 127).clamp_min(torch.finfo(torch.float32).tiny)
        whole = (rows / step + 0.5).floor() * step
    return rows + (whole - rows).detach()
