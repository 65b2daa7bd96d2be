"""Wakes the readers of a topic as soon as a producer on this machine has written to it.

Kafka answers a waiting fetch when a record arrives, the embedded broker only after the full wait. Its producers
therefore touch the topic's file after each acknowledgement, and its readers wait for that (inotify) instead of fetching
many times a second. A missed touch delays a record, but loses none: readers also fetch without a touch, less often.
"""

import ctypes
import os
import select
from contextlib import suppress
from pathlib import Path

_IN_ATTRIB = 0x4
_READ_BYTES = 4_096


class ArrivalFile:
    """The file of one topic in the folder that producers and readers share; None without a folder."""

    def __init__(self, folder: Path | None, topic: str) -> None:
        self._path = None if folder is None else folder / topic

    def touch(self) -> None:
        if self._path is not None:
            with suppress(OSError):  # no reader has made it yet
                os.utime(self._path)

    def watch(self) -> "ArrivalWatch | None":
        """Return a new watch; None without a folder, or where the system has no inotify left."""
        if self._path is None:
            return None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch()
            return ArrivalWatch(self._path)
        except (OSError, AttributeError):
            return None


class ArrivalWatch:
    """Waits for touches of one file. Used from one thread; close it."""

    def __init__(self, path: Path) -> None:
        """Raise OSError if the system allows no further watch, AttributeError if it has no inotify."""
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = int(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        if self._fd < 0 or libc.inotify_add_watch(self._fd, os.fsencode(path), _IN_ATTRIB) < 0:
            error = ctypes.get_errno()
            self.close()
            raise OSError(error, os.strerror(error), str(path))
        self._ready = select.poll()
        self._ready.register(self._fd, select.POLLIN)

    def wait(self, timeout_s: float) -> bool:
        """Return whether the file was touched since the last call, after at most `timeout_s`."""
        if not self._ready.poll(timeout_s * 1_000):
            return False
        with suppress(BlockingIOError):
            while os.read(self._fd, _READ_BYTES):
                pass
        return True

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
