"""Weights are moved to 2 MB pages unchanged."""

import platform
import re
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path

import pytest
import torch

from services.llm.engine.cpu.packing import use_huge_pages
from tests.support.wait import wait_for

HAVE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
KERNEL = tuple(int(number) for number in re.findall(r"\d+", platform.release())[:2])
MB = 2**20


def in_huge_pages_bytes() -> int:
    """Return the bytes of this process's memory in huge pages."""
    match = re.search(r"^AnonHugePages:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert match
    return int(match[1]) * 1024


def fresh_memory(size: int) -> torch.Tensor:
    """Return a tensor in memory fresh from the kernel; reused memory may already be in huge pages."""
    return torch.frombuffer(mmap(-1, 4 * size, flags=MAP_PRIVATE | MAP_ANONYMOUS), dtype=torch.int32)


@pytest.mark.skipif(not HAVE.exists() or "[never]" in HAVE.read_text(), reason="the kernel gives no huge pages here")
@pytest.mark.skipif(KERNEL < (6, 1), reason="an older kernel moves pages only when it finds the time")
def test_tensors_are_moved_unchanged() -> None:
    """Many adjacent small tensors and a large tensor move to huge pages without a change of address or content.

    If other processes take the memory, the kernel may not find a free huge page at first.
    """
    small, large = fresh_memory(16 * MB), fresh_memory(8 * MB)
    small.copy_(torch.arange(16 * MB, dtype=torch.int32))
    large.copy_(torch.arange(8 * MB, dtype=torch.int32))
    before = in_huge_pages_bytes()

    def are_moved() -> bool:
        use_huge_pages([large, *reversed(small.split(MB // 8))])
        return in_huge_pages_bytes() - before >= (62 + 30) * MB

    wait_for(are_moved, 20.0, "huge pages")

    assert torch.equal(small, torch.arange(16 * MB, dtype=torch.int32))
    assert torch.equal(large, torch.arange(8 * MB, dtype=torch.int32))
