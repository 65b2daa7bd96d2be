"""A stand-in on the CPU for a device that records: a replay really runs the body again, over what its inputs hold now.

What a graph cannot do shows here: inputs are poisoned after each replay, so that whatever is not written anew is seen to be
stale, and outputs of other recordings are poisoned before each one, because graphs share their memory.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from services.llm.engine.graph_device import Body

_POISON = {torch.int64: 2**40, torch.int32: 2**30, torch.uint8: 0xFF, torch.float32: 1e9, torch.bfloat16: 1e9}


class ReplayingDevice:
    """Keeps its recordings, and counts their replays."""

    def __init__(self) -> None:
        self.recordings: list[ReplayedBody] = []

    def record(self, body: Body, inputs: Sequence[Tensor]) -> "ReplayedBody":
        """Run the body once and keep it."""
        recording = ReplayedBody(self, body, inputs)
        self.recordings.append(recording)
        return recording

    @property
    def num_replays(self) -> int:
        """Replays of all recordings."""
        return sum(recording.num_replays for recording in self.recordings)


class ReplayedBody:
    """One recording, whose outputs stay in place."""

    def __init__(self, device: ReplayingDevice, body: Body, inputs: Sequence[Tensor]) -> None:
        self._device = device
        self._body = body
        self._inputs = inputs
        self.num_replays = 0
        self.outputs = tuple(output.clone() for output in body())
        _poison(inputs)

    def replay(self) -> None:
        """Run the body again into the same outputs, then spoil the inputs."""
        self.num_replays += 1
        for recording in self._device.recordings:
            _poison(recording.outputs)
        found = self._body()
        for output, value in zip(self.outputs, found, strict=True):
            assert (output.shape, output.dtype) == (value.shape, value.dtype), "a recorded step changed its shape"
            output.copy_(value)


def _poison(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        tensor.fill_(_POISON[tensor.dtype])
