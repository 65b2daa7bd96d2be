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
    """CUDA graphs of one engine that share one memory pool: only one runs at a time, and its outputs are copied at once.

    Graphs are captured on the current stream, the engine's own, and nothing but that stream is waited for: another engine may serve
    from the same card, in another thread. torch's context manager for captures would wait for the whole device and return its cached
    memory to the driver, which stops all work on it.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, body: Body, inputs: Sequence[Tensor]) -> CapturedGraph:
        """Run the body until all kernels are compiled and all memory is allocated, then capture it."""
        for _ in range(_NUM_WARM_UP_RUNS):
            body()
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            outputs = body()
        finally:
            graph.capture_end()
        return _CudaGraph(graph, outputs)


class _CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: tuple[Tensor, ...]) -> None:
        self._graph = graph
        self.outputs = outputs

    def replay(self) -> None:
        self._graph.replay()
