"""The log lines of every process: one JSON object per line, to standard output or to a shared file.

Each line is one write to the kernel at the moment it is logged: a killed process loses no line, and a stop needs no
flush. A line that cannot be written at once is dropped: a log line must never cost an answer.

The file is for Ray's workers. Ray redirects their output to its own files, and Ray Serve replaces `print`, `sys.stdout`
and `sys.stderr` there by a logger that buffers a thousand lines, so the file is written directly.
"""

import fcntl
import logging
import os
import select
from contextlib import suppress
from pathlib import Path
from typing import TextIO, cast

import structlog
from structlog.typing import EventDict, WrappedLogger

MAX_LOG_BYTES = 20_000_000
"""A log file of this size is renamed to `<name>.old`, replacing the previous one."""
_STANDARD_OUTPUT = 1


def configure_logging(level: str, part: str, log_file: Path | None = None) -> None:
    """Configure structlog for this process; `part` labels each line with the process's part.

    Without a file the lines go to standard output. Exceptions that a library only logs are lines too: in Ray's workers
    nobody would see them.
    """

    def name(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event.update(part=part, pid=pid)
        return event

    pid = os.getpid()
    out = StandardOutput() if log_file is None else SharedFile(log_file)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.MaybeTimeStamper(fmt="iso", utc=True),
            name,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", out)),
    )
    root = logging.getLogger()
    if not any(isinstance(handler, _LibraryFailures) for handler in root.handlers):
        root.addHandler(_LibraryFailures(logging.ERROR))


class _LibraryFailures(logging.Handler):
    """Turns errors that a library logs with their exception into our lines; its other messages are dropped."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log the exception of an error, if it has one."""
        if record.exc_info:
            log = structlog.get_logger()
            log.error("library_failed", library=record.name, message=record.getMessage(), exc_info=record.exc_info)


class _Lines:
    """Writes whole lines to a descriptor that a subclass provides for each line."""

    _is_torn = False
    """Set if a disk became full within the last line."""

    def write(self, line: str) -> int:
        """Write the line, or drop it."""
        with suppress(OSError):
            descriptor = self._descriptor()
            if descriptor is not None:
                text = f"\n{line}" if self._is_torn else line
                self._is_torn = os.write(descriptor, text.encode()) < len(text)
        return len(line)

    def flush(self) -> None:
        """Do nothing: no line is buffered."""

    def _descriptor(self) -> int | None:
        raise NotImplementedError


class StandardOutput(_Lines):
    """The process's standard output, regardless of `sys.stdout`. A full pipe drops the line and blocks no caller."""

    def __init__(self) -> None:
        self._room = select.poll()
        self._room.register(_STANDARD_OUTPUT, select.POLLOUT)

    def _descriptor(self) -> int | None:
        return _STANDARD_OUTPUT if self._room.poll(0) else None


class SharedFile(_Lines):
    """A file that several processes append to.

    The process that finds it full renames it; all processes then open the new file.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._open: tuple[int, tuple[int, int]] | None = None
        """Descriptor and identity of the open file."""

    def _descriptor(self) -> int:
        status = self._find()
        if self._open is not None and status is not None and _identity(status) == self._open[1]:
            if status.st_size < self._max_bytes:
                return self._open[0]
            self._rotate(self._open)
        return self._reopen()

    def _find(self) -> os.stat_result | None:
        with suppress(FileNotFoundError):
            return self._path.stat()
        return None

    def _rotate(self, full: tuple[int, tuple[int, int]]) -> None:
        """Rename the full file, unless another process has done so or is about to."""
        descriptor, identity = full
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (status := self._find()) is not None and _identity(status) == identity:
                self._path.rename(self._path.with_name(f"{self._path.name}.old"))

    def _reopen(self) -> int:
        if self._open is not None:
            os.close(self._open[0])  # and with it the lock
            self._open = None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._open = descriptor, _identity(os.fstat(descriptor))
        return descriptor


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
