"""The interface between captured steps and the device that replays them: CUDA graphs, or a CPU stand-in in tests.

A body is warmed up, captured once over tensors that stay in place, and then replayed. It takes no arguments, has no
data-dependent control flow, and does not wait for the device. All bodies of an engine are warmed up before the first is
captured: during a capture no kernel may be compiled or loaded, and no library workspace allocated.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch
from torch import Tensor

Body = Callable[[], tuple[Tensor, ...]]

_NUM_WARM_UP_RUNS = 2


class CapturedGraph(Protocol):
    """A captured body. `outputs` stay in place; a replay of any graph may overwrite them."""

    outputs: tuple[Tensor, ...]

    def replay(self) -> None:
        """Run the body over the current contents of its inputs. Does not wait."""
        ...


class GraphDevice(Protocol):
    """Captures bodies."""

    def warm_up(self, body: Body) -> None:
        """Run a body eagerly until its kernels are compiled and loaded and its workspaces are allocated."""
        ...

    def capture(self, body: Body, inputs: Sequence[Tensor]) -> CapturedGraph:
        """Capture a body that was warmed up and that reads these tensors, which stay in place."""
        ...


class CapturedStep:
    """One shape of a step: `pad` fills its inputs with padding before each run that is not a replay."""

    def __init__(self, device: GraphDevice, body: Body, inputs: Sequence[Tensor], pad: Callable[[], None]) -> None:
        self._device, self._body, self._inputs, self._pad = device, body, inputs, pad
        self._graph: CapturedGraph | None = None

    def warm_up(self) -> None:
        """Run the body on padding."""
        self._pad()
        self._device.warm_up(self._body)

    def capture(self) -> None:
        """Capture the body on padding."""
        self._pad()
        self._graph = self._device.capture(self._body, self._inputs)

    def replay(self) -> tuple[Tensor, ...]:
        """Run the body over the current inputs and return its outputs, which the next replay overwrites.

        Does not wait.
        """
        assert self._graph is not None, "captured before it is replayed"
        self._graph.replay()
        return self._graph.outputs


class CaptureDriver(Protocol):
    """The torch calls that captures need, for the current stream."""

    def new_graph(self) -> Any: ...

    def synchronize(self) -> None:
        """Wait only for the stream on which graphs are captured."""
        ...

    def begin(self, graph: Any) -> None:
        """Start a capture into the pool that the graphs of this driver share."""
        ...


class TorchCaptures:
    """torch's CUDA graphs on the stream that is current at the first capture, in a separate memory pool.

    torch's own context manager for captures would wait for the whole device and return its cached memory to the driver,
    which stops all work on the device.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream | None = None

    def new_graph(self) -> torch.cuda.CUDAGraph:
        """Return an empty graph."""
        self._stream = self._stream or torch.cuda.current_stream()
        return torch.cuda.CUDAGraph()

    def synchronize(self) -> None:
        (self._stream or torch.cuda.current_stream()).synchronize()

    def begin(self, graph: torch.cuda.CUDAGraph) -> None:
        """Start a capture. Other threads may use the device meanwhile: another engine may serve on the same card."""
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")


class CudaGraphDevice:
    """CUDA graphs of one engine that share one memory pool and one stream.

    Only one graph runs at a time, and its outputs are copied immediately. All graphs are destroyed together, after
    their last replay. Since torch 2.12 the destruction of one graph frees cuBLAS' workspace of the stream on which it
    was captured (pytorch#193402), and the other graphs of that stream hold its address. So a graph is never destroyed
    separately, even if its capture failed, and no two engines share a stream (`DeviceStream`).
    """

    def __init__(self, driver: CaptureDriver | None = None) -> None:
        self._driver = driver or TorchCaptures()
        self._graphs: list[Any] = []

    def warm_up(self, body: Body) -> None:
        """Run the body twice: the second run uses the allocations of the first."""
        for _ in range(_NUM_WARM_UP_RUNS):
            body()

    def capture(self, body: Body, inputs: Sequence[Tensor]) -> CapturedGraph:
        """Capture the body, after all work of the stream."""
        self._driver.synchronize()
        graph = self._driver.new_graph()
        self._graphs.append(graph)
        with _without_collection():
            self._driver.begin(graph)
            try:
                outputs = body()
            except BaseException:
                with suppress(Exception):  # a failed capture cannot be ended either; its own error counts
                    graph.capture_end()
                raise
            graph.capture_end()
        return _CudaGraph(graph, outputs)

    def release(self) -> None:
        """Destroy all graphs, after the last replay of any graph."""
        graphs, self._graphs = self._graphs, []
        if graphs:
            self._driver.synchronize()
        for graph in graphs:
            graph.reset()

    def __del__(self) -> None:
        """Release the remaining graphs; at the end of a process the device may already be unavailable."""
        with suppress(Exception):
            self.release()


@contextmanager
def _without_collection() -> Iterator[None]:
    """Keep the garbage collector from destroying another engine's graphs and tensors during a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _CudaGraph:
    def __init__(self, graph: Any, outputs: tuple[Tensor, ...]) -> None:
        self._graph = graph
        self.outputs = outputs

    def replay(self) -> None:
        self._graph.replay()
