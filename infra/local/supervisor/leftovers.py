"""Find and kill processes that a stack left behind, by mark and process group.

Keepers make this unnecessary except when a supervisor and a keeper are killed at the same moment. Ray's processes
rename themselves, which overwrites the mark in their environment, but they stay in their part's process group, which
its keeper leads.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

import psutil

from infra.local.supervisor.stackfile import MARK

GONE = 0
"""The process group of a process that has ended."""


def find_leftovers(state_dir: Path, groups: frozenset[int] = frozenset()) -> list[psutil.Process]:
    """Return this user's processes in one of `groups` or in the group of a process with this stack's mark."""
    ours = [process for process in psutil.process_iter() if _is_ours(process)]
    marked = groups | {_group(process) for process in ours if _is_marked(process, state_dir)}
    return [process for process in ours if _group(process) in marked - {GONE, os.getpgrp()}]


def end_leftovers(state_dir: Path, timeout_s: float = 10.0) -> int:
    """SIGKILL leftovers until none remain. Returns the number of processes killed."""
    groups: frozenset[int] = frozenset()
    num_hit = 0
    give_up = time.monotonic() + timeout_s
    while (left := find_leftovers(state_dir, groups)) and time.monotonic() < give_up:
        groups |= {_group(process) for process in left}
        for process in left:
            with suppress(psutil.Error):
                process.kill()
                num_hit += 1
        psutil.wait_procs(left, timeout=1.0)
    return num_hit


def _is_ours(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        is_same_user = process.uids().effective == os.geteuid()
        return bool(is_same_user and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _is_marked(process: psutil.Process, state_dir: Path) -> bool:
    with suppress(psutil.Error, OSError):
        return bool(process.environ().get(MARK) == str(state_dir))
    return False


def _group(process: psutil.Process) -> int:
    try:
        return os.getpgid(process.pid)
    except ProcessLookupError:
        return GONE
