"""Describes an error of the file system by the option or setting that named the path. Pure, apart from `exists`."""

import errno
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from services.errors import DataError, TailraceError

_FIXES = {
    errno.ENOENT: "give an existing path",
    errno.EISDIR: "give a file",
    errno.ENOSPC: "free space on its disk, or give a path on another disk",
    errno.EDQUOT: "free space in this user's quota, or give a path on another disk",
    errno.ENAMETOOLONG: "give a shorter path",
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST, errno.ELOOP), "give a path whose parents are folders"),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO), "give a path that this user may read and write"
    ),
}
_OF_THE_PATH = (errno.ENOENT, errno.EISDIR)
"""Also the errors of a defect; a user's path causes them only if it does not exist, or is not a file."""


def described(failure: Exception, words: Sequence[str], settings: Mapping[str, Path]) -> str | None:
    """Return `source: path: problem; fix`, or None for an error that no given path explains.

    `words` are the command's arguments; `settings` the paths by variable.
    """
    error = _as_os_error(failure)
    fix = None if error is None else _FIXES.get(error.errno or 0)
    if error is None or fix is None:
        return None
    if not isinstance(error.filename, str):  # a write reports no path
        return None if error.errno in _OF_THE_PATH else f"{error.strerror}; {fix} (the state folder is {_STATE})"
    path = _absolute(error.filename)
    given = [*_arguments(words), *((name, _absolute(value)) for name, value in settings.items())]
    matches = [(name, own) for name, own in given if _concerns(own, path, error.errno)]
    if not matches:
        is_plain = error.errno not in _OF_THE_PATH
        return f"{path}: {error.strerror}; {fix} (the state folder is {_STATE})" if is_plain else None
    name, _ = max(matches, key=lambda match: len(match[1].parts))
    return f"{name}: {path}: {error.strerror}; {fix}"


def with_option(error: TailraceError, words: Sequence[str]) -> str:
    """Return the error's text, after the option that gave the file if the file as a whole is wrong."""
    if not isinstance(error, DataError) or error.path is None:
        return str(error)
    path = error.path.absolute()
    option = next((name for name, given in _arguments(words) if given == path and name.startswith("--")), None)
    return str(error) if option is None else f"{option}: {error}"


_STATE = "TAILRACE_STATE_DIR"
_IN_TEXT = re.compile(r"(?:\(os error|\[Errno) (\d+)[)\]](?:: (/\S+))?")


def _as_os_error(failure: Exception) -> OSError | None:
    """Return an error of the file system; polars and shutil report number and path only in a text."""
    if isinstance(failure, OSError) and failure.errno is not None:
        return failure
    match = _IN_TEXT.search(str(failure))
    return None if match is None else OSError(int(match[1]), os.strerror(int(match[1])), match[2])


def _arguments(words: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Yield each argument that may be a path, with the name of its option, or the argument itself."""
    option = ""
    for word in words:
        if word.startswith("--"):
            option, _, value = word.partition("=")
            if value:
                yield option, _absolute(value)
        elif word:
            yield option or word, _absolute(word)
            option = ""


def _concerns(given: Path, path: Path, number: int | None) -> bool:
    """Return whether `path` is the given path, above it, below it, or a scratch file alongside it."""
    is_near = path == given or path in given.parents or (path.parent == given.parent and given.name in path.name)
    if number in _OF_THE_PATH:
        return is_near or (given in path.parents and not given.exists())
    return is_near or given in path.parents


def _absolute(path: str | Path) -> Path:
    return Path(path).absolute()
