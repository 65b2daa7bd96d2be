"""Asynchronous copies between host and device, through pinned memory.

On a CPU, tensors are used where they are and nothing is copied.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to a device without blocking the host; kernels launched later see the copy."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """Copies of device tensors to the host, started in stream order."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._done: torch.cuda.Event | None = None
        if self._tensors and self._tensors[0].is_cuda:
            self._tensors = [_pinned_copy(tensor) for tensor in tensors]
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def arrays(self) -> list[np.ndarray]:
        """Wait for the copies and return them."""
        if self._done is not None:
            self._done.synchronize()
        return [tensor.cpu().numpy() for tensor in self._tensors]


def _pinned_copy(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
