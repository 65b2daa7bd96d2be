"""Finished work goes to its place through the disk: after a loss of power a name stands for all of its content, or is not there.

A rename alone is atomic for those who read, but the name may reach the disk before the content does.
"""

import os
from pathlib import Path


def put_in_place(scratch: Path, target: Path) -> None:
    """Write a finished file, or a folder with all that is in it, through to disk and give it its name, then write that.

    A file takes the place of the one that is there, a folder must not find one. Raises OSError; `scratch` then is where it was.
    """
    for path in sorted(scratch.rglob("*")) if scratch.is_dir() else ():
        _write_through(path)
    _write_through(scratch)
    scratch.replace(target)
    _write_through(target.parent)


def put_unless_there(scratch: Path, folder: Path) -> None:
    """Put a finished folder in place; one that somebody else has finished meanwhile is as good, and stays. Raises OSError."""
    try:
        put_in_place(scratch, folder)
    except OSError:
        if not folder.exists():
            raise


def _write_through(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
