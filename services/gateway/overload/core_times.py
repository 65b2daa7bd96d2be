"""Reads how long the calling thread ran, and how long it ran or waited for a core."""

import os
import time

_SCHEDSTAT = "/proc/thread-self/schedstat"
"""On Linux: nanoseconds that the thread ran, and nanoseconds that it was runnable without a core."""


class CoreTimes:
    """The times of the thread that reads them; close it."""

    def __init__(self) -> None:
        self._fd: int | None = None

    def read(self, now_s: float) -> tuple[float, float]:
        """Return both times in seconds. Where the system does not count waits, the thread always wants a core."""
        ran_s = time.thread_time()
        try:
            if self._fd is None:
                self._fd = os.open(_SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
            return ran_s, ran_s + int(os.pread(self._fd, 64, 0).split()[1]) / 1e9
        except OSError:
            return ran_s, now_s

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
