"""Freed memory is used again inside the block, and is returned at its end."""

import platform
import resource
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest

from pipelines.training.fit.memory import kept_memory

BYTES = 1 << 26


def faults() -> int:
    """Return the page faults of a step: a large array is made, filled and freed, again and again."""
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
    """After a first time no large array costs a page fault; before and afterwards each does."""
    with ProcessPoolExecutor(1, get_context("spawn")) as fresh:  # whose heap no library's mapping stands in the way of
        before, inside, after = fresh.submit(counted).result()

    assert inside < before / 10
    assert after > before / 2
