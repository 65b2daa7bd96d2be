"""Asks the kernel to keep weights in pages of 2 MB.

A step reads all of them: with 4 kB each page costs a walk through the page tables, two in a virtual machine, and the processor's
own prefetching ends with it.

By `MADV_HUGEPAGE` and `MADV_COLLAPSE` (Linux 6.1), which moves what is there at once; an older kernel does so when it finds the time.
Where there are no such pages nothing happens. Never an error.
"""

import ctypes
import sys
from collections.abc import Iterable

from torch import Tensor

_PAGE_BYTES = 2 * 2**20
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25


def use_huge_pages(tensors: Iterable[Tensor]) -> None:
    """Move contiguous tensors into such pages, those that lie side by side together; addresses and contents stay."""
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for first, last in _whole_pages(sorted(_stretch(tensor) for tensor in tensors)):
        for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
            madvise(first, last - first, advice)


def _stretch(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


def _whole_pages(stretches: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join stretches less than a page apart, and give what of them is whole pages."""
    joined: list[tuple[int, int]] = []
    for first, last in stretches:
        if joined and first - joined[-1][1] < _PAGE_BYTES:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    whole = [(-(-first // _PAGE_BYTES) * _PAGE_BYTES, last // _PAGE_BYTES * _PAGE_BYTES) for first, last in joined]
    return [(first, last) for first, last in whole if first < last]
