"""The memory of a fit: how much its steps take at most, and what keeps it from going back to the kernel between them.

Memory that is freed and needed again at once, as by each step, stays with the process. glibc returns a block of over 32 MiB to the kernel when it is freed, and smaller ones at the end of its heap. The kernel then clears each page of the next one and enters
it by a fault of its own, which takes longer than what is computed in it: of a student's step over 10^6 items more than half.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Of malloc.h: how much free memory the heap's end may have, and how many blocks may be outside of the heap."""
_NO_TRIMMING = -1
_STATUS, _CLEAR_REFS, _RESET_PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs"), "5"
"""Of proc(5): VmRSS, its peak VmHWM, and what resets that."""
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


class PeakMemory:
    """The most memory that one kind of work has taken of this process, above what was taken when this was made; other work lies between `note` and `begin`.

    On a GPU that is what tensors took, by torch's allocator; else resident memory by Linux, whose peak can be reset. `bytes` stays None elsewhere.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.bytes: int | None = None
        self.of_process = 0
        """The process's own peak, of all work."""
        self._before = self._now()
        self.begin()

    def begin(self) -> None:
        """Measure from now on."""
        self.of_process = max(self.of_process, self._peak() or 0)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        try:
            _CLEAR_REFS.write_text(_RESET_PEAK)
        except OSError:  # not Linux, or a container that hides it
            self._before = None

    def note(self) -> None:
        """Measure up to now."""
        peak = self._peak()
        if peak is not None and self._before is not None:
            self.of_process = max(self.of_process, peak)
            self.bytes = max(self.bytes or 0, peak - self._before)

    def _peak(self) -> int | None:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return _of_status("VmHWM")

    def _now(self) -> int | None:
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        return _of_status("VmRSS")


def _of_status(name: str) -> int | None:
    """Return a number of Linux's account of this process, in bytes."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((1_024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)
