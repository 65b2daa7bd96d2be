"""The hash by which files are known: packages, tables, and the files of a bundle."""

import hashlib
from pathlib import Path


def file_sha256(path: Path) -> str:
    """Hash a file's bytes, to 64 hex digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
