"""An engine's work on its device without waiting: its stream, and copies between host and device through pinned memory.

On a CPU there is no stream, and tensors are used where they are.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor


class DeviceStream:
    """The queue of one engine's work: a CUDA stream of its own, on its own card; nothing on a CPU.

    Two engines share a card while a bundle is replaced. Each enters its stream for all its work, in whichever thread, so neither waits
    for the other, and no call of an engine waits for the whole device.
    """

    def __init__(self, device: torch.device) -> None:
        """Make a stream whose work follows what the calling thread has started on the device: loading the weights."""
        self._stream: torch.cuda.Stream | None = None
        self._marked: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def entered(self) -> AbstractContextManager[object]:
        """Return a context in which the stream and its device are the calling thread's current ones. Does not wait."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def mark(self) -> None:
        """Note the work that was started so far, for `follow` of other streams."""
        if self._stream is not None:
            marked = torch.cuda.Event()  # type: ignore[no-untyped-call]
            marked.record(self._stream)
            self._marked = marked

    def follow(self, others: Iterable["DeviceStream"]) -> None:
        """Order what is started from now on after what the others have marked. Waits on the device, not here."""
        if self._stream is not None:
            for marked in [other._marked for other in others]:
                if marked is not None:
                    self._stream.wait_event(marked)


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
