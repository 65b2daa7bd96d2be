"""Weights are moved into pages of 2 MB without a change, and where that cannot be nothing happens."""

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
    """How much of this process's memory lies in such pages."""
    found = re.search(r"^AnonHugePages:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) * 1024


def fresh_memory(size: int) -> torch.Tensor:
    """Numbers in memory of their own, straight from the kernel: what was used before may lie in huge pages already."""
    return torch.frombuffer(mmap(-1, 4 * size, flags=MAP_PRIVATE | MAP_ANONYMOUS), dtype=torch.int32)


@pytest.mark.skipif(not HAVE.exists() or "[never]" in HAVE.read_text(), reason="the kernel gives no huge pages here")
@pytest.mark.skipif(KERNEL < (6, 1), reason="an older kernel moves pages only when it finds the time")
def test_tensors_are_moved_unchanged() -> None:
    """Many small tensors side by side, and a large one, are in huge pages afterwards, at the same place and with the same numbers.

    While other processes take the memory, the kernel may find no free page of this size at first.
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
