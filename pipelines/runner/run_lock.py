"""The lock of a folder of stage outputs: one run at a time, since a run removes old outputs.

The lock is the kernel's (flock), so it ends with its process. On a volume that several machines share it holds where
that volume supports flock, as NFS and CephFS do.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from rich.console import Console

from services.stream.erasure.tables import STAGES_LOCK


@contextmanager
def run_lock(root: Path, console: Console) -> Iterator[None]:
    """Hold the folder's lock; while another run holds it, print that and wait."""
    with run_lock_if_free(root) as is_free:
        if is_free:
            yield
            return
    console.print(f"waiting for another run in {root}", markup=False)
    with _lock(root):
        yield


@contextmanager
def run_lock_if_free(root: Path) -> Iterator[bool]:
    """Hold the folder's lock and yield True; yield False when another run holds it."""
    try:
        held = _lock(root).acquire(blocking=False)
    except Timeout:
        yield False
        return
    with held:
        yield True


def _lock(root: Path) -> FileLock:
    root.mkdir(parents=True, exist_ok=True)
    return FileLock(root / STAGES_LOCK)
