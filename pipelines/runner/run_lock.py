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
    with turn_if_free(root) as is_free:
        if is_free:
            yield
            return
    console.print(f"waiting for another run in {root}", markup=False)
    with _lock(root):
        yield


@contextmanager
def turn_if_free(root: Path) -> Iterator[bool]:
    """Work in the folder alone, and say True; False while another run does."""
    try:
        held = _lock(root).acquire(blocking=False)
    except Timeout:
        yield False
        return
    with held:
        yield True


def _lock(root: Path) -> FileLock:
    root.mkdir(parents=True, exist_ok=True)
    return FileLock(root / "LOCK")
