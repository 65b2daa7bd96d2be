"""Adds new items to the live bundles: periodically starts a process that adds items found only in the live catalogue.

The process ends after each run, which frees its memory and keeps its failures away from the canary analysis.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import IO

import structlog

log = structlog.get_logger()

COMMAND = (sys.executable, "-m", "pipelines.publication.new_items")


class Additions:
    """Starts the command every `every_s` seconds (0: never), after the previous run has ended."""

    def __init__(self, every_s: float, now_s: float, command: Sequence[str] = COMMAND) -> None:
        """`now_s` is the time on the clock of `look`; the first run starts `every_s` later."""
        self._every_s = every_s
        self._next_s = now_s + every_s
        self._command = command
        self._running: tuple[subprocess.Popen[bytes], IO[bytes]] | None = None
        self._said = ""

    def look(self, now_s: float) -> None:
        """Start the command if it is due, and log its output once it has ended. Does not wait.

        Consecutive equal failures are logged once.
        """
        if self._running is not None:
            self._take_up(*self._running)
        elif self._every_s and now_s >= self._next_s:
            self._next_s = now_s + self._every_s
            output = tempfile.TemporaryFile()  # noqa: SIM115 - open for as long as the process
            self._running = subprocess.Popen(self._command, stdout=output, stderr=subprocess.STDOUT), output

    def close(self) -> None:
        """Terminate a running command; its publication is atomic."""
        if self._running is not None:
            process, output = self._running
            process.terminate()
            process.wait()
            output.close()

    def _take_up(self, process: subprocess.Popen[bytes], output: IO[bytes]) -> None:
        if (code := process.poll()) is None:
            return
        output.seek(0)
        text = output.read().decode(errors="replace").strip()
        output.close()
        self._running = None
        if code and text != self._said:
            log.warning("items_not_added", said=text, code=code)
        elif text and not code:
            log.info("items_added", said=text)
        self._said = text if code else ""
