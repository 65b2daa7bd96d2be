"""The versions of an object store that are on this machine's disk, within a bound; shared by processes of the machine.

    <root>/files/<sha256>           downloaded once, verified by hash
    <root>/versions/<version>/      links to these files
    <root>/versions/.evicted.*      a version that is being deleted

Whoever opens a version holds a shared lock on its manifest until it drops its `VersionHold`; a killed process drops its
locks.
A version is deleted only under the exclusive lock, after a rename, so a reader finds it whole or not at all.
"""

import fcntl
import os
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from models.files import rename_if_absent
from models.registry.manifest import MANIFEST

_ROOM_SHARE = 0.1


class VersionHold:
    """Keeps a version in the cache while it is referenced: an open, locked manifest."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __del__(self) -> None:
        os.close(self._descriptor)


class VersionCache:
    """The cached versions. All methods may be called from several threads and processes."""

    def __init__(self, root: Path, max_bytes: int) -> None:
        """`max_bytes` bounds the files, not counting versions that are held."""
        self.files, self._versions = root / "files", root / "versions"
        self._max_bytes = max_bytes
        self._room_bytes = 0.0

    def folder_of(self, version: str) -> Path:
        """Return the folder of a version, which may be absent."""
        return self._versions / version

    def has(self, version: str) -> bool:
        """Whether the version is cached now; only `hold` keeps it so."""
        return (self.folder_of(version) / MANIFEST).exists()

    def hold(self, version: str) -> VersionHold | None:
        """Return a hold on a version, which counts as opened now; None if it is absent."""
        path = self.folder_of(version) / MANIFEST
        try:
            hold = _locked(path, fcntl.LOCK_SH)
        except FileNotFoundError:
            return None
        with suppress(OSError):
            os.utime(path)  # least recently opened versions are evicted first
        return hold

    def keep(
        self, folder: Path, version: str, digests: Mapping[str, str], *, are_durable: bool = False
    ) -> VersionHold | None:
        """Make a finished folder of these files, by their SHA-256, the cached version, and return a hold on it.

        `are_durable`: the files are links to cached files. Only the manifest is then flushed to disk, since a link that
        a power loss removes is made again. Returns None if another process has finished the version first.
        """
        self._room_bytes -= sum((folder / name).stat().st_size for name in digests)
        if self._room_bytes < 0:
            self._make_room()
        self.files.mkdir(parents=True, exist_ok=True)
        for name, digest in digests.items():
            with suppress(FileExistsError):
                os.link(folder / name, self.files / digest)
        self._versions.mkdir(parents=True, exist_ok=True)
        hold = _locked(folder / MANIFEST, fcntl.LOCK_SH)  # before others can evict it
        rename_if_absent(folder, self.folder_of(version), [folder / MANIFEST] if are_durable else None)
        return None if folder.exists() else hold

    def _make_room(self) -> None:
        """Delete the least recently opened versions until the files fit, and files that no version uses.

        Called again after a part of the room is used, since it looks at every file: other processes fill the rest.
        """
        opened = {path: status.st_mtime for path, status in _statuses(self._versions, f"*/{MANIFEST}")}
        for manifest in sorted(opened, key=lambda path: opened[path]):
            if self._free_bytes() >= 0:
                break
            if self._evict(manifest):
                self._delete_unused()
        self._room_bytes = self._free_bytes() * _ROOM_SHARE

    def _free_bytes(self) -> int:
        return self._max_bytes - sum(status.st_size for _, status in _statuses(self.files, "*"))

    def _evict(self, manifest: Path) -> bool:
        """Delete a version unless it is held; return whether it is deleted."""
        evicted = self._versions / f".evicted.{uuid4().hex}"
        try:
            lock = _locked(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
            manifest.parent.rename(evicted)
        except OSError:  # held, or evicted by another process
            return False
        shutil.rmtree(evicted, ignore_errors=True)
        del lock
        return True

    def _delete_unused(self) -> None:
        for path, status in _statuses(self.files, "*"):
            if status.st_nlink == 1:
                path.unlink(missing_ok=True)


def _locked(path: Path, operation: int) -> VersionHold:
    """Open and lock a file that is still at this path. Raises FileNotFoundError, or BlockingIOError if locked."""
    mode = os.O_RDWR if operation & fcntl.LOCK_EX else os.O_RDONLY  # as NFS requires
    hold = VersionHold(descriptor := os.open(path, mode))
    fcntl.flock(descriptor, operation)
    if not os.path.samestat(os.fstat(descriptor), path.stat()):
        raise FileNotFoundError(path)
    return hold


def _statuses(folder: Path, pattern: str) -> Collection[tuple[Path, os.stat_result]]:
    """Return the matching paths with their status, without those that another thread or process deletes meanwhile."""
    statuses = []
    for path in folder.glob(pattern):
        with suppress(FileNotFoundError):
            statuses.append((path, path.stat()))
    return statuses
