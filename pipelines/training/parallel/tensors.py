"""Tensors that may be sharded over several processes: torch's DTensor, which a single process need not import."""

from collections.abc import Callable

import torch
from torch import Tensor

ELSEWHERE = torch.empty(0, device="meta")
Like = Callable[[str], Tensor | None]
"""Returns a tensor with the layout of the named tensor; None if every process holds it whole, ELSEWHERE if this process
holds no part of it."""


def nothing_alike(_name: str) -> None:
    """Return None: the `Like` of a single process."""


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a sharded tensor, as a view; otherwise the tensor itself."""
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def is_sharded(tensor: Tensor) -> bool:
    """Return whether the tensor is a DTensor."""
    return hasattr(tensor, "to_local")


def placed(value: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor in another tensor's layout over the processes.

    The other tensor has the same shape, or the value broadcasts to it.
    """
    if not is_sharded(like) or is_sharded(value):
        return value.to(like.device)
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    wide = value.to(like.device).expand(like.shape).contiguous()
    return distribute_tensor(wide, like.device_mesh, like.placements, src_data_rank=None)
