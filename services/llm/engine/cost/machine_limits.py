"""What this machine reaches at best, measured here and now: memory read once through, and one large product of matrices.

On the threads that torch has been given and in the model's own dtype, so that an engine's steps can be held against it.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from services.llm.engine.cost.step_cost import Limits

_TRIES = 5
_QUICK_BYTES = {"cpu": 128 * 2**20, "cuda": 2**30}
_QUICK_SIDE = {"cpu": 1_024, "cuda": 4_096}


def measure_limits(device: torch.device, dtype: torch.dtype, *, effort: int = 1) -> Limits:
    """Take the best of a few tries, in about half a second on two cores; `effort` 2 to 4 reads and multiplies more, for a benchmark.

    Another process on the same cores makes both limits look smaller than they are.
    """
    num_bytes, side = effort * _QUICK_BYTES[device.type], effort * _QUICK_SIDE[device.type]
    source = torch.ones(num_bytes // 4, device=device)
    read_s = min(_best_seconds(read, device) for read in _reads(source))
    left, right = (_matrix(side, seed, device, dtype) for seed in range(2))
    product_s = _best_seconds(lambda: left @ right, device)
    return Limits(bytes_per_s=num_bytes / read_s, flops_per_s=2 * side**3 / product_s)


def _reads(source: Tensor) -> list[Callable[[], Tensor]]:
    """Ways to read a vector of fp32 once: which is the fastest depends on the build of torch."""
    rows = source.view(-1, 4_096)
    ones = torch.ones(4_096, device=source.device)
    return [source.sum, lambda: rows.mv(ones), source.max]


def _matrix(side: int, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Make up numbers of all kinds: of equal ones a GPU flips few bits, and multiplies faster than it ever does a model's."""
    drawn = torch.randn(2, side, device=device, generator=torch.Generator(device).manual_seed(seed))
    return (drawn[0].unsqueeze(-1) + drawn[1]).to(dtype)


def _best_seconds(work: Callable[[], object], device: torch.device) -> float:
    took = _cuda_seconds if device.type == "cuda" else _host_seconds
    return min(took(work) for _ in range(_TRIES))


def _host_seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _cuda_seconds(work: Callable[[], object]) -> float:
    """Take the device's own time of a second run, which is launched while it is at the first: the host's would count launch and wait."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    work()
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1_000
