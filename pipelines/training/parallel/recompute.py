"""Activation recomputation (checkpointing) in the backward pass: less memory for the same gradients, bit for bit.

`full` keeps only a block's input and computes a third more; `selective` also keeps the outputs of matrix products and
attention, and recomputes the cheap rest.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from pipelines.training.options import Recompute

_KEPT = (
    "mm", "addmm", "bmm", "baddbmm", "addbmm", "_addmm_activation", "_int_mm", "_grouped_mm", "_scaled_mm",
    "_scaled_mm_v2", "_scaled_grouped_mm", "_scaled_grouped_mm_v2", "convolution",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_attention_math_for_mps",
    "_flash_attention_forward", "_flash_attention_forward_no_dropout_inplace", "_efficient_attention_forward",
    "_cudnn_attention_forward",
)  # fmt: skip
"""torch's matrix products and attention for all devices and versions of torch. Absent operations are skipped."""


def kept_operations() -> list[Any]:
    """Return the operations whose outputs `selective` keeps, in every overload."""
    packets = [getattr(torch.ops.aten, name) for name in _KEPT if hasattr(torch.ops.aten, name)]
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads() if overload != "out"]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the elements of the model's module lists: a decoder's layers, a student's hops."""
    return [block for module in model.children() if isinstance(module, nn.ModuleList) for block in module]


@contextmanager
def recomputed(model: nn.Module, how: str) -> Iterator[None]:
    """Recompute activations of the model's blocks as `how` says, inside this block."""
    blocks = [] if how == Recompute.NONE else blocks_of(model)
    kept: dict[str, Any] = (
        {"context_fn": partial(create_selective_checkpoint_contexts, kept_operations())}
        if how == Recompute.SELECTIVE
        else {}
    )
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **kept)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


class _Block(nn.Module):
    """Attention of four heads of size 64, and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.up, self.down = nn.Linear(256, 768), nn.Linear(256, 1_024), nn.Linear(1_024, 256)

    def forward(self, x_BLD: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (4, 64)).transpose(1, 2) for x in self.qkv(x_BLD).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        out: Tensor = self.down(functional.silu(self.up(mixed)))
        return out


def flops_factor(how: str, device: torch.device, dtype: torch.dtype) -> float:
    """Return the ratio of FLOPs executed with this recomputation to FLOPs without it.

    `full` adds a third; `selective` is counted by torch over a small block on this device, with the attention that
    training uses there.
    """
    if how != Recompute.SELECTIVE:
        return 4 / 3 if how == Recompute.FULL else 1.0
    counts = []
    for recompute in (Recompute.NONE, how):
        model = nn.Module()
        model.blocks = nn.ModuleList([_Block().to(device, dtype)])
        x_BLD = torch.zeros(1, 256, 256, device=device, dtype=dtype, requires_grad=True)
        with FlopCounterMode(display=False) as counter, recomputed(model, recompute):
            model.blocks[0](x_BLD).sum().backward()
        counts.append(counter.get_total_flops())
    return float(counts[1] / counts[0])
