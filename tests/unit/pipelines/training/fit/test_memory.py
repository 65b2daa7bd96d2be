"""Freed memory is reused inside the block, and returned to the system at its end."""

import platform
import resource
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest

from pipelines.training.fit.memory import kept_memory

BYTES = 1 << 26


def faults() -> int:
    """Return the page faults of a step that repeatedly allocates, fills and frees a large array."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        np.ones(BYTES, dtype=np.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def counted() -> tuple[int, int, int]:
    """Return the page faults of a step before, inside and after the block."""
    before = faults()
    with kept_memory():
        faults()
        inside = faults()
    return before, inside, faults()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has no such options")
def test_memory_is_kept_inside_the_block_alone() -> None:
    """Inside the block, only the first allocations cause page faults; outside, each does."""
    with ProcessPoolExecutor(1, get_context("spawn")) as fresh:  # a heap without library mappings
        before, inside, after = fresh.submit(counted).result()

    assert inside < before / 10
    assert after > before / 2
