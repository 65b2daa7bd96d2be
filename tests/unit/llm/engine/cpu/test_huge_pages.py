"""Weights are moved into pages of 2 MB without a change, and where that cannot be nothing happens."""

import re
from pathlib import Path

import pytest
import torch

from services.llm.engine.cpu.huge_pages import use_huge_pages

HAVE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MB = 2**20


def in_huge_pages_bytes() -> int:
    """How much of this process's memory lies in such pages."""
    found = re.search(r"^AnonHugePages:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) * 1024


@pytest.mark.skipif(not HAVE.exists() or "[never]" in HAVE.read_text(), reason="the kernel gives no huge pages here")
def test_tensors_are_moved_unchanged() -> None:
    """Many small tensors side by side, and a large one, are in huge pages afterwards, at the same place and with the same numbers."""
    small = list(torch.arange(16 * MB, dtype=torch.int32).split(MB // 8))
    large = torch.arange(4 * MB, dtype=torch.int64)
    places = [tensor.data_ptr() for tensor in (*small, large)]
    before = in_huge_pages_bytes()

    use_huge_pages([large, *reversed(small)])

    if in_huge_pages_bytes() == before:
        pytest.skip("the kernel moves pages only when it finds the time")
    assert in_huge_pages_bytes() - before >= (64 + 32 - 4 * 2) * MB
    assert [tensor.data_ptr() for tensor in (*small, large)] == places
    assert torch.equal(torch.cat(small), torch.arange(16 * MB, dtype=torch.int32))
    assert torch.equal(large, torch.arange(4 * MB, dtype=torch.int64))


@pytest.mark.parametrize("size", [0, 1, 5_000])
def test_what_is_smaller_than_a_page_is_left(size: int) -> None:
    """Nothing happens to it."""
    tensor = torch.ones(size)

    use_huge_pages([tensor])

    assert torch.equal(tensor, torch.ones(size))
