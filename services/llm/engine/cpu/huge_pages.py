"""Requests 2 MB pages for the weights (Linux).

A step reads all weights. With 4 kB pages each page costs a page table walk, nested in a virtual machine, and the hardware prefetcher
stops at its end. `MADV_HUGEPAGE` and `MADV_COLLAPSE` (Linux 6.1) convert existing pages at once; older kernels do it in the
background. Without huge pages nothing happens; never an error.
"""

import ctypes
import sys
from collections.abc import Iterable

from torch import Tensor

_PAGE_BYTES = 2 * 2**20
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25


def use_huge_pages(tensors: Iterable[Tensor]) -> None:
    """Convert the memory of contiguous tensors to huge pages. Addresses and contents do not change."""
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for first, last in _whole_pages(sorted(_extent(tensor) for tensor in tensors)):
        for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
            madvise(first, last - first, advice)


def _extent(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


def _whole_pages(extents: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join extents less than a page apart and return the whole pages inside them."""
    joined: list[tuple[int, int]] = []
    for first, last in extents:
        if joined and first - joined[-1][1] < _PAGE_BYTES:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    whole = [(-(-first // _PAGE_BYTES) * _PAGE_BYTES, last // _PAGE_BYTES * _PAGE_BYTES) for first, last in joined]
    return [(first, last) for first, last in whole if first < last]
