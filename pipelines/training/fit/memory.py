"""Memory that is freed and needed again at once, as by each step of a fit, stays with the process.

glibc returns a block of over 32 MiB to the kernel when it is freed, and smaller ones at the end of its heap. The kernel then clears each page of the next one and enters
it by a fault of its own, which takes longer than what is computed in it: of a student's step over 10^6 items more than half.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Of malloc.h: how much free memory the heap's end may have, and how many blocks may be outside of the heap."""
_NO_TRIMMING = -1
_USUAL_TRIM_BYTES, _USUAL_MMAP_MAX = 1 << 26, 1 << 16


@contextmanager
def kept_memory() -> Iterator[None]:
    """Inside this block freed memory is kept; at its end what is free is returned. No effect where the C library is not glibc."""
    glibc = ctypes.CDLL(None)
    if not hasattr(glibc, "mallopt") or not hasattr(glibc, "malloc_trim"):
        yield
        return
    glibc.mallopt(_M_MMAP_MAX, 0)
    glibc.mallopt(_M_TRIM_THRESHOLD, _NO_TRIMMING)
    try:
        yield
    finally:
        glibc.mallopt(_M_MMAP_MAX, _USUAL_MMAP_MAX)
        glibc.mallopt(_M_TRIM_THRESHOLD, _USUAL_TRIM_BYTES)
        glibc.malloc_trim(0)
