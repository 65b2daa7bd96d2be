"""A CPU stand-in for a device with graphs: a replay runs the body again over the current contents of its inputs.

It detects misuse of graphs. It poisons inputs after each replay, so stale inputs show, and outputs of other graphs
before each replay, because graphs share their memory. It refuses operations that wait for the device or copy to it, and
replays whose operations or memory differ from the capture.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from services.llm.engine.gpu.graph_device import Body

_POISON = {torch.int64: 2**40, torch.int32: 2**30, torch.uint8: 0xFF, torch.float32: 1e9, torch.bfloat16: 1e9}


class ReplayingDevice:
    """Keeps the captured graphs and counts their replays."""

    def __init__(self) -> None:
        self.recordings: list[ReplayedBody] = []
        self.loaded: set[str] = set()
        """Operations of warm-ups, whose kernels are loaded."""
        self.warmed: dict[Body, tuple[_NoWaiting, tuple[Tensor, ...]]] = {}

    def warm_up(self, body: Body) -> None:
        """Run the body once. The capture reuses this run's results, since runs dominate the time of engine tests."""
        with _NoWaiting() as warmed:
            self.warmed[body] = warmed, body()
        self.loaded |= set(warmed.operations)

    def capture(self, body: Body, inputs: Sequence[Tensor]) -> "ReplayedBody":
        """Run the body once and keep it. Refuses operations that no warm-up loaded."""
        recording = ReplayedBody(self, body, inputs)
        self.recordings.append(recording)
        return recording

    @property
    def num_replays(self) -> int:
        return sum(recording.num_replays for recording in self.recordings)


class ReplayedBody:
    """A capture, whose outputs stay in place."""

    def __init__(self, device: ReplayingDevice, body: Body, inputs: Sequence[Tensor]) -> None:
        self._device = device
        self._body = body
        self._inputs = inputs
        self.num_replays = 0
        if body in device.warmed:
            recorded, outputs = device.warmed.pop(body)
        else:
            with _NoWaiting() as recorded:
                outputs = body()
        self.outputs = tuple(output.clone() for output in outputs)
        self._recorded = recorded
        missing = set(recorded.operations) - device.loaded
        assert not missing, f"loaded during a capture: {sorted(missing)}"
        _poison(inputs)

    def replay(self) -> None:
        """Run the body again into the same outputs, then poison the inputs."""
        self.num_replays += 1
        for recording in self._device.recordings:
            _poison(recording.outputs)
        with _NoWaiting() as replayed:
            outputs = self._body()
        assert replayed.operations == self._recorded.operations, "a recorded step took another way"
        assert replayed.read <= self._recorded.read, "a tensor that a recorded step reads was replaced"
        for output, value in zip(self.outputs, outputs, strict=True):
            assert (output.shape, output.dtype) == (value.shape, value.dtype), "a recorded step changed its shape"
            output.copy_(value)
        _poison(self._inputs)


class _NoWaiting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations that a CUDA graph cannot capture.

    `read` are the addresses of the body's external inputs, `operations` all its operations.
    """

    _WAITING = (
        "_local_scalar_dense",
        "item",
        "is_nonzero",
        "lift_fresh",
        "nonzero",
        "masked_select",
        "_unique2",
        "unique_dim",
        "repeat_interleave.Tensor",
        "repeat_interleave.self_Tensor",
        "_pin_memory",
        "bincount",
    )

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.read: set[int] = set()
        self.operations: list[str] = []
        self._made: set[int] = set()

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = operation.name().partition("::")[2]
        assert name not in self._WAITING, f"{name} waits for the device"
        if name.partition(".")[0] in ("index", "index_put", "index_put_"):
            assert all(x is None or x.dtype != torch.bool for x in args[1]), "indexing by a mask waits for the device"
        self.operations.append(name)
        self.read |= _addresses((args, kwargs)) - self._made
        call: Callable[..., Any] = operation
        result = call(*args, **(kwargs or {}))
        self._made |= _addresses(result) - self.read
        return result


def _addresses(tree: Any) -> set[int]:
    """Return the start addresses of all non-empty tensors."""
    addresses = {x.untyped_storage().data_ptr() for x in tree_leaves(tree) if isinstance(x, Tensor)}
    return addresses - {0}


def _poison(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        tensor.fill_(_POISON[tensor.dtype])
