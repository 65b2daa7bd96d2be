"""An engine's asynchronous work on its device: its stream, and copies between host and device through pinned memory.

On a CPU, work runs without a stream, and tensors are used in place.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import ClassVar
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from services.errors import ConfigError


class DeviceStream:
    """The queue of one engine's work: a separate CUDA stream on its card; empty on a CPU.

    Two engines share a card while a bundle is replaced. Each runs all its work in its own stream, from any thread, so
    neither waits for the other, and no call of an engine waits for the whole device. Streams are unique per engine:
    torch hands out pooled streams round-robin, and cuBLAS workspaces, which captured graphs keep, belong to streams.
    """

    _in_use: ClassVar["WeakValueDictionary[tuple[int, int], DeviceStream]"] = WeakValueDictionary()
    _lock: ClassVar[Lock] = Lock()

    def __init__(self, device: torch.device) -> None:
        """Create a stream whose work follows the calling thread's earlier work on the device: loading the weights."""
        self._stream: torch.cuda.Stream | None = None
        self._marked: torch.cuda.Event | None = None
        if device.type == "cuda":
            with self._lock:
                self._stream = draw_unused(lambda: torch.cuda.Stream(device), self._in_use)  # type: ignore[no-untyped-call]
                self._in_use[_key(self._stream)] = self
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def entered(self) -> AbstractContextManager[object]:
        """Return a context that makes the stream and its device current for the calling thread. Does not wait."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def mark(self) -> None:
        """Mark the work started so far, for `follow` of other streams."""
        if self._stream is not None:
            marked = torch.cuda.Event()  # type: ignore[no-untyped-call]
            marked.record(self._stream)
            self._marked = marked

    def follow(self, others: Iterable["DeviceStream"]) -> None:
        """Order later work after the marked work of the other streams. The device waits, not the host."""
        if self._stream is not None:
            for marked in [other._marked for other in others]:
                if marked is not None:
                    self._stream.wait_event(marked)


_NUM_DRAWS = 64
"""Twice the streams of torch's pool."""


def draw_unused(draw: Callable[[], torch.cuda.Stream], in_use: Collection[tuple[int, int]]) -> torch.cuda.Stream:
    """Return a pooled stream that is not in use. Raises ConfigError if all are in use."""
    for _ in range(_NUM_DRAWS):
        stream = draw()
        if _key(stream) not in in_use:
            return stream
    raise ConfigError(f"{len(in_use)} engines on one card: a card has streams for 32; serve the others elsewhere")


def _key(stream: torch.cuda.Stream) -> tuple[int, int]:
    return stream.device_index, stream.cuda_stream


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
