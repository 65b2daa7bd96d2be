"""Installs the lock into the environment that runs this, and shows one line of progress instead of pip's list of hundreds.

`python infra/install.py requirements.lock`. Standard library alone, since nothing else is there yet. What pip said is kept
in `install.log` in the environment's folder, and its end is shown when it fails.
"""

import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

_TOLD_AT_FAILURE = 15
_FOUND = ("Collecting ", "Requirement already satisfied: ")
_UNPACKING = "Installing collected packages"
_BAR = 24


class Shown:
    """One line that is written again and again on a terminal; a line for each phase elsewhere."""

    def __init__(self, num_packages: int, out: TextIO) -> None:
        self._num_packages = num_packages
        self._out = out
        self._is_terminal = out.isatty()
        self._began_s = time.monotonic()
        self._num_found = 0
        self._doing = ""
        self._say("downloading")

    def read(self, line: str) -> None:
        """Follow pip by one line of its own."""
        if line.startswith(_FOUND):
            self._num_found = min(self._num_found + 1, self._num_packages)
        elif line.startswith(_UNPACKING) and self._doing != "unpacking":
            self._say("unpacking")
        self.draw()

    def draw(self) -> None:
        """Write the line again."""
        if self._is_terminal:
            filled = _BAR * self._num_found // self._num_packages
            counted = f"{self._num_found}/{self._num_packages} packages"
            bar = "━" * filled + " " * (_BAR - filled)
            self._write(f"\r{self._doing:<12}{bar} {counted}, {self._elapsed()} ")

    def end(self) -> None:
        """Leave the line as it is."""
        self._write("\n" if self._is_terminal else f"{self._elapsed()} in all\n")

    def _elapsed(self) -> str:
        return f"{time.monotonic() - self._began_s:.0f} s"

    def _say(self, doing: str) -> None:
        self._doing = doing
        if not self._is_terminal:
            self._write(f"{doing} {self._num_packages} packages\n")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def install(command: Sequence[str], num_packages: int, log: Path, out: TextIO) -> int:
    """Run pip, show how far it is, and give its exit status; its words go to `log`."""
    shown, is_over = Shown(num_packages, out), threading.Event()

    def tick() -> None:
        while not is_over.wait(1.0):
            shown.draw()

    last_lines: deque[str] = deque(maxlen=_TOLD_AT_FAILURE)
    ticking = threading.Thread(target=tick)
    ticking.start()
    try:
        with (
            log.open("w") as kept,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip,
        ):
            for line in pip.stdout or ():
                kept.write(line)
                last_lines.append(line)
                shown.read(line)
    finally:
        is_over.set()
        ticking.join()
        shown.end()
    if pip.returncode:
        out.write("".join([*last_lines, f"pip failed; all that it said is in {log}\n"]))
    return pip.returncode


def num_pins(lock: Path) -> int:
    """Count the lock's packages."""
    return sum(bool(line.strip()) and not line.startswith("#") for line in lock.read_text().splitlines())


if __name__ == "__main__":
    lock_file = Path(sys.argv[1])
    pip_install = (sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "-r", str(lock_file))
    sys.exit(install(pip_install, num_pins(lock_file), Path(sys.prefix) / "install.log", sys.stdout))
