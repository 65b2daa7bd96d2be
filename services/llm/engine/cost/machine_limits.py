"""Measures the machine's limits: memory bandwidth by one large read, compute rate by one large matrix product.

Uses torch's current number of threads and the model's dtype, so that an engine's steps can be compared with the result.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from services.llm.engine.device import DeviceStream


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """The measured maximum of a machine: bytes read per second, and FLOPs per second in the model's dtype."""

    bytes_per_s: float
    flops_per_s: float


_TRIES = 5
_QUICK_BYTES = {"cpu": 128 * 2**20, "cuda": 2**30}
_QUICK_SIDE = {"cpu": 1_024, "cuda": 4_096}
_SMALLEST_SIDE = 256
_LONGEST_TRY_S = 0.5


def measure_limits(device: torch.device, dtype: torch.dtype, *, effort: int = 1) -> MachineLimits:
    """Return the best of a few tries.

    Takes about half a second on two cores; `effort` 2 to 4 measures longer, for a benchmark.
    Load from other processes on the same cores makes both limits look smaller than they are.
    """
    with DeviceStream(device).entered():
        return _measured(device, dtype, effort)


def _measured(device: torch.device, dtype: torch.dtype, effort: int) -> MachineLimits:
    num_bytes, side = effort * _QUICK_BYTES[device.type], effort * _QUICK_SIDE[device.type]
    source = torch.ones(num_bytes // 4, device=device)
    read_s = min(_best_seconds(read, device) for read in _reads(source))
    return MachineLimits(bytes_per_s=num_bytes / read_s, flops_per_s=_product_rate(side, device, dtype))


def _product_rate(max_side: int, device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of the largest square product, of at most `max_side`, that runs within `_LONGEST_TRY_S`.

    On a processor without bf16 instructions a product in bf16 takes a hundred times as long as in fp32.
    """
    side = min(_SMALLEST_SIDE, max_side)
    while True:
        left, right = (_matrix(side, seed, device, dtype) for seed in range(2))
        product_s = _best_seconds(partial(torch.matmul, left, right), device)
        if side == max_side or 8 * product_s > _LONGEST_TRY_S:
            return 2 * side**3 / product_s
        side *= 2


def _reads(source: Tensor) -> list[Callable[[], Tensor]]:
    """Return several ways to read a vector of fp32 once: the fastest depends on the build of torch."""
    rows = source.view(-1, 4_096)
    ones = torch.ones(4_096, device=source.device)
    return [source.sum, lambda: rows.mv(ones), source.max]


def _matrix(side: int, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a matrix of random numbers: equal numbers flip few bits, which makes a GPU faster than on a real model."""
    drawn = torch.randn(2, side, device=device, generator=torch.Generator(device).manual_seed(seed))
    return (drawn[0].unsqueeze(-1) + drawn[1]).to(dtype)


def _best_seconds(work: Callable[[], object], device: torch.device) -> float:
    measure = _cuda_seconds if device.type == "cuda" else _host_seconds
    return min(measure(work) for _ in range(_TRIES))


def _host_seconds(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def _cuda_seconds(work: Callable[[], object]) -> float:
    """Return the device time of a second run, launched during the first: host time would include launch and wait."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    work()
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1_000
