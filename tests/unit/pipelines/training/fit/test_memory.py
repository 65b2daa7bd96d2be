"""Freed memory is used again inside the block, and is returned at its end."""

import platform
import resource

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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has no such options")
def test_memory_is_kept_inside_the_block_alone() -> None:
    """After a first time no large array costs a page fault; before and afterwards each does."""
    outside = faults()
    with kept_memory():
        faults()
        inside = faults()

    assert inside < outside / 10
    assert faults() > outside / 2
