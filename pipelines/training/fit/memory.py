"""Memory of a fit: peak memory of its steps, and allocator settings that avoid page faults between steps.

A step frees memory that the next step needs again. glibc returns freed blocks of over 32 MiB, and smaller ones at the
end of its heap, to the kernel. The kernel then clears each page of the next allocation and maps it by a page fault,
which takes longer than the computation in it: more than half of a student's step over 10^6 items. Inside `kept_memory`
such memory stays with the process.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""mallopt options (malloc.h): free memory kept at the end of the heap, and the number of blocks outside of the heap."""
_NO_TRIMMING = -1
_STATUS, _CLEAR_REFS, _RESET_PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs"), "5"
"""Fields of proc(5): VmRSS and its peak VmHWM; writing `_RESET_PEAK` to clear_refs resets the peak."""
_USUAL_TRIM_BYTES, _USUAL_MMAP_MAX = 1 << 26, 1 << 16


@contextmanager
def kept_memory() -> Iterator[None]:
    """Keep freed memory inside this block and return it at the end. No effect if the C library is not glibc."""
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
    """Peak memory of one kind of work, above the memory at construction; other work runs between `note` and `begin`.

    On a GPU this is the memory of tensors by torch's allocator; otherwise resident memory on Linux, where the peak can
    be reset. `bytes` stays None elsewhere.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.bytes: int | None = None
        self.of_process = 0
        """Peak of the process over all work."""
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
        except OSError:  # not Linux, or a container without access to it
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
    """Return a field of this process's status under Linux, in bytes."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((1_024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)
