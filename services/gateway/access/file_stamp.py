"""What tells one state of a file from another, for those who follow a file that others replace."""

from pathlib import Path

Stamp = tuple[int, int, int]
"""Inode, time of the last change in ns, size: a file that was edited, replaced, or swapped behind a link has another."""


def stamp_of(path: Path) -> Stamp | None:
    """Return a file's stamp, links followed; None while there is none."""
    try:
        seen = path.stat()
    except OSError:
        return None
    return seen.st_ino, seen.st_mtime_ns, seen.st_size
