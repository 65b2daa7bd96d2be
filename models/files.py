"""Durable renames, file hashes, and stamps that tell whether a file has changed.

A rename is atomic for readers, but without fsync the name may reach the disk before the content. With the functions
here, after a power loss a name refers to its complete content or does not exist.
"""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

Stamp = tuple[int, int, int]
"""Inode, modification time in ns, size: changes if a file is edited, replaced, or swapped behind a link."""


def rename_durably(scratch: Path, target: Path, changed: Iterable[Path] | None = None) -> None:
    """Flush a finished file or folder to disk, rename it to `target` and flush the rename.

    Of a folder, all contents are flushed, or only the `changed` paths. A file replaces an existing target; a folder
    requires an absent target. Raises OSError and leaves `scratch` unchanged.
    """
    contents = sorted(scratch.rglob("*")) if scratch.is_dir() else ()
    for path in contents if changed is None else changed:
        _fsync(path)
    _fsync(scratch)
    scratch.replace(target)
    _fsync(target.parent)


def rename_if_absent(scratch: Path, folder: Path, changed: Iterable[Path] | None = None) -> None:
    """Rename a finished folder durably; if another process has finished the same folder meanwhile, keep that folder.

    Raises OSError.
    """
    try:
        rename_durably(scratch, folder, changed)
    except OSError:
        if not folder.exists():
            raise


def write_durably(path: Path, content: bytes) -> None:
    """Replace or create a file, and its folder if it is missing. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_bytes(content)
    rename_durably(scratch, path)


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, as 64 hex digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def stamp_of(path: Path) -> Stamp | None:
    """Return a file's stamp, following links; None if the file does not exist."""
    try:
        seen = path.stat()
    except OSError:
        return None
    return seen.st_ino, seen.st_mtime_ns, seen.st_size


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
