"""Finds and ends processes that a stack left behind, by the mark in their environment.

The keepers make this unnecessary in all but one case: a supervisor and a keeper killed at the same moment.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

import psutil

from infra.local.stackfile import MARK


def find_leftovers(state_dir: Path) -> list[psutil.Process]:
    """Give our processes that carry this stack's mark. Processes of other users are not ours to see."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            is_other = process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE
            if is_other and process.environ().get(MARK) == str(state_dir):
                found.append(process)
    return found


def end_leftovers(state_dir: Path, timeout_s: float = 10.0) -> int:
    """SIGKILL what is left until nothing is. Gives how many processes were hit."""
    num_hit = 0
    give_up = time.monotonic() + timeout_s
    while (left := find_leftovers(state_dir)) and time.monotonic() < give_up:
        for process in left:
            with suppress(psutil.Error):
                process.kill()
                num_hit += 1
        psutil.wait_procs(left, timeout=1.0)
    return num_hit
