"""Runs that share a folder of stage outputs take turns: a run removes old outputs, which another one may be about to read.

The lock is the kernel's (flock), so it ends with its process. On a volume that several machines share it holds as far as that
volume's locks do, which NFS and CephFS give.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from rich.console import Console


@contextmanager
def turn(root: Path, console: Console) -> Iterator[None]:
    """Work in the folder alone; while another run does, wait, and say so."""
    lock = _lock(root)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        console.print(f"waiting for another run in {root}", markup=False)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def turn_if_free(root: Path) -> Iterator[bool]:
    """Work in the folder alone, and say True; False while another run does."""
    lock = _lock(root)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _lock(root: Path) -> FileLock:
    root.mkdir(parents=True, exist_ok=True)
    return FileLock(root / "LOCK")
