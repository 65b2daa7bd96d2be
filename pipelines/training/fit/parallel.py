"""The processes of one fit: today one, whose model, gradients and files are its own. The loop asks here and nowhere else.

`wrap` returns what computes the loss; validations, checkpoints and the averaged weights are those of the model itself.
"""

import torch.distributed as dist
from torch import nn


def rank() -> int:
    """Return this process's number, 0 where it is the only one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def is_main() -> bool:
    """Whether this process writes checkpoints and reports progress."""
    return rank() == 0


def wrap(model: nn.Module) -> nn.Module:
    """Return the model that computes the loss: in one process the model itself."""
    return model
