"""The interface between captured steps and the device that replays them: CUDA graphs, or a CPU stand-in in tests.

A body is captured once over tensors that stay in place and then replayed. It takes no arguments, takes no decision that depends on
data, and does not wait for the device.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

Body = Callable[[], tuple[Tensor, ...]]

_NUM_WARM_UP_RUNS = 2


class CapturedGraph(Protocol):
    """One captured body. `outputs` stay in place; a replay of any graph may overwrite them."""

    outputs: tuple[Tensor, ...]

    def replay(self) -> None:
        """Run the body over the current contents of its inputs. Does not wait."""
        ...


class GraphDevice(Protocol):
    """Captures bodies."""

    def capture(self, body: Body, inputs: Sequence[Tensor]) -> CapturedGraph:
        """Capture a body that reads these tensors, which stay in place. Runs it a few times first."""
        ...


class CudaGraphDevice:
    """CUDA graphs that share one memory pool: only one runs at a time, and its outputs are copied at once."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def capture(self, body: Body, inputs: Sequence[Tensor]) -> CapturedGraph:
        """Run the body on a side stream until all kernels are compiled and all memory is allocated, then capture it there."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(_NUM_WARM_UP_RUNS):
                body()
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            outputs = body()
        return _CudaGraph(graph, outputs)


class _CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: tuple[Tensor, ...]) -> None:
        self._graph = graph
        self.outputs = outputs

    def replay(self) -> None:
        self._graph.replay()
