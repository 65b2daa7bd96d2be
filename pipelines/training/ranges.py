"""Named ranges of a fit for profilers: in torch traces (Kineto), and as NVTX ranges for Nsight on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch.autograd.profiler import record_function


@contextmanager
def named(name: str) -> Iterator[None]:
    """Run this block in a range of this name.

    Names are data, step, forward, backward, communication, optimizer, checkpoint and validation.
    """
    has_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    on_gpu = torch.cuda.nvtx.range(name) if has_gpu else nullcontext()
    with record_function(name), on_gpu:
        yield
