"""The queue of one engine's work on its device: a CUDA stream of its own, on its own card; nothing on a CPU.

Two engines share a card while a bundle is replaced. Each enters its stream for all its work, in whichever thread, so neither waits for
the other, and no call of an engine waits for the whole device.
"""

from contextlib import AbstractContextManager, nullcontext

import torch


class DeviceStream:
    """One engine's stream."""

    def __init__(self, device: torch.device) -> None:
        """Make a stream whose work follows what the calling thread has started on the device: loading the weights."""
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def entered(self) -> AbstractContextManager[object]:
        """Return a context in which the stream and its device are the calling thread's current ones. Does not wait."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
