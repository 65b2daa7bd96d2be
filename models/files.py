"""Durable renames, file hashes, and stamps that tell whether a file has changed.

A rename is atomic for readers, but without fsync the name may reach the disk before the content. With the functions
here, after a power loss a name refers to its complete content or does not exist.
"""

import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from glob import escape
from pathlib import Path

SCRATCH_KEPT_S = 86_400
"""A scratch file or folder of this age was left by a killed process."""
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


def write_durably(path: Path, content: bytes, mode: int | None = None) -> None:
    """Replace or create a file with these permissions, and its folder if it is missing. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = scratch_of(path)
    try:
        with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode or 0o666), "wb") as out:
            if mode is not None:
                os.fchmod(out.fileno(), mode)
            out.write(content)
        rename_durably(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def scratch_of(path: Path) -> Path:
    """Return a new path `.NAME.RANDOM` next to a file or folder, and remove the paths that killed processes left."""
    sweep_scratch(path)
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


def sweep_scratch(path: Path) -> None:
    """Remove files and folders `.NAME.*` next to `path` that are unchanged for a day."""
    before_ns = time.time_ns() - SCRATCH_KEPT_S * 1_000_000_000
    for left in path.parent.glob(f".{escape(path.name)}.*"):
        if (seen := stamp_of(left)) is None or seen[1] > before_ns:
            continue
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def each_file(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, then the files that a second listing adds.

    A file that another process renames while the first are read is in the second listing under its new name. A yielded
    file may have been renamed or removed. Raises OSError for a folder that cannot be listed.
    """
    seen: set[Path] = set()
    for _ in range(2):
        listed = {Path(parent, name) for parent, _, names in os.walk(folder, onerror=_unless_absent) for name in names}
        yield from sorted(listed - seen)
        seen |= listed


def _unless_absent(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, as 64 hex digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def status_of(path: Path) -> os.stat_result | None:
    """Return a file's status, following links; None if the file does not exist, or was renamed since it was listed."""
    with suppress(FileNotFoundError):
        return path.stat()
    return None


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
