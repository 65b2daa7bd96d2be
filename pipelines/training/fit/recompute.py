"""Activations that are computed again in the backward pass instead of being kept: less memory for the same gradients, bit for bit.

`full` keeps a block's input alone and computes a third more; `selective` also keeps what products and attention made, and repeats the cheap rest.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

_KEPT = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]


class Recompute(StrEnum):
    """What of a block is computed again."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the elements of the model's lists of modules: a decoder's layers, a student's hops."""
    return [block for module in model.children() if isinstance(module, nn.ModuleList) for block in module]


@contextmanager
def recomputed(model: nn.Module, how: str) -> Iterator[None]:
    """Inside this block, the model's blocks keep no more of their forward passes than this."""
    blocks = [] if how == Recompute.NONE else blocks_of(model)
    kept: dict[str, Any] = (
        {"context_fn": partial(create_selective_checkpoint_contexts, _KEPT)} if how == Recompute.SELECTIVE else {}
    )
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **kept)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward
