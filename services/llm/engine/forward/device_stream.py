"""The queue of one engine's work on its device: a CUDA stream of its own, on its own card; nothing on a CPU.

Two engines share a card while a bundle is replaced. Each enters its stream for all its work, in whichever thread, so neither waits for
the other, and no call of an engine waits for the whole device.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch


class DeviceStream:
    """One engine's stream."""

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
