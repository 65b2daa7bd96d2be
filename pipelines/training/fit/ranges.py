"""Names of what a fit does, for profilers: in torch's traces (Kineto) on any device, and as NVTX ranges for Nsight where there is a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch.autograd.profiler import record_function


@contextmanager
def named(name: str) -> Iterator[None]:
    """Inside this block, what runs is in a range of this name: data, step, forward, backward, communication, optimizer, checkpoint, validation."""
    has_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    on_gpu = torch.cuda.nvtx.range(name) if has_gpu else nullcontext()
    with record_function(name), on_gpu:
        yield
