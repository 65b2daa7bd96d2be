"""The seam between recorded steps and the device that replays them.

A body is recorded once over tensors that stay in place and then run again by replaying it: it takes no arguments, makes no
decision that depends on data and waits for nothing. On CUDA it is a graph; in tests, a stand-in on the CPU.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

Body = Callable[[], tuple[Tensor, ...]]

_NUM_DRY_RUNS = 2


class Recording(Protocol):
    """One recorded body. `outputs` stay in place; each replay, of any recording, may overwrite them."""

    outputs: tuple[Tensor, ...]

    def replay(self) -> None:
        """Run the body once more over what its inputs hold now. Does not wait."""
        ...


class GraphDevice(Protocol):
    """Records bodies."""

    def record(self, body: Body, inputs: Sequence[Tensor]) -> Recording:
        """Record a body that reads these tensors, which stay in place. Runs it a few times."""
        ...


class CudaGraphDevice:
    """CUDA graphs that share one pool of memory, because only one runs at a time and what it gives is copied at once."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(self, body: Body, inputs: Sequence[Tensor]) -> Recording:
        """Run the body on a side stream until everything is compiled and allocated, then capture it there."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(_NUM_DRY_RUNS):
                body()
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            outputs = body()
        return _CudaRecording(graph, outputs)


class _CudaRecording:
    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: tuple[Tensor, ...]) -> None:
        self._graph = graph
        self.outputs = outputs

    def replay(self) -> None:
        self._graph.replay()
