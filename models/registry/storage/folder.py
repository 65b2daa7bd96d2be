"""Bundles in a folder: one folder per version, one file per name. The default, also for an embedded stack.

    <root>/<version>/manifest.json
    <root>/names/<name>.json
    <root>/.<version>.<pid>         scratch of a process: a publication in progress, or a version that is being deleted

Versions and records are renamed into place under a lock on the folder: readers see the old state or the new state,
never a mixture, even after a power loss.
"""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from glob import escape
from hashlib import sha256
from pathlib import Path

from models.documents import is_version
from models.files import rename_if_absent, write_durably
from models.registry.name_record import DEFAULT_NAME, is_name
from models.registry.storage.port import OpenedFolder, StoredRecord

_REMOVED = ".removed"
SCRATCH_KEPT_S = 24 * 3_600
"""Age above which a scratch folder cannot belong to a running publication."""


class FolderStorage:
    """A folder of versions and names, shared by processes, and by hosts if the file system supports locks (NFS 4)."""

    is_lost = False

    def __init__(self, root: Path) -> None:
        self._root = root

    def __str__(self) -> str:
        return str(self._root)

    def read_record(self, name: str) -> StoredRecord:
        """Return a name's record."""
        with suppress(FileNotFoundError):
            content = self._record(name).read_bytes()
            return StoredRecord(content, sha256(content).hexdigest())
        return StoredRecord(self._from_pointer_files() if name == DEFAULT_NAME else None, None)

    def marks(self, names: Collection[str]) -> Mapping[str, str]:
        """Return the marks of these names, except of a name without a readable record."""
        marks = {}
        for name in names:
            with suppress(OSError):
                marks[name] = sha256(self._record(name).read_bytes()).hexdigest()
        return marks

    def keep_record(self, name: str, content: bytes) -> None:
        """Do nothing: the records are on this machine."""

    def kept_record(self, name: str) -> bytes | None:
        return None

    def swap_record(self, name: str, seen: str | None, content: bytes) -> bool:
        """Replace a name's record if it has not changed since it was read."""
        self._record(name).parent.mkdir(parents=True, exist_ok=True)
        with self._locked():
            if self.read_record(name).mark != seen:
                return False
            write_durably(self._record(name), content)
        return True

    def names(self) -> list[str]:
        """Return the names that have a record."""
        names = {path.stem for path in (self._root / "names").glob("*.json") if is_name(path.stem)}
        return sorted(names | ({DEFAULT_NAME} if (self._root / "LIVE").exists() else set()))

    def add(self, folder: Path, version: str) -> None:
        """Rename a finished folder, created at a `scratch` path, into place."""
        with self.alone():
            rename_if_absent(folder, self._root / version)

    def folder_of(self, version: str) -> OpenedFolder:
        return OpenedFolder(self._root / version)

    def manifest_folder_of(self, version: str, with_report: bool = False) -> Path:
        return self._root / version

    def versions(self) -> list[str]:
        """Return the versions, oldest first."""
        if not self._root.exists():
            return []
        dated = []
        for path in self._root.iterdir():
            with suppress(FileNotFoundError):  # deleted meanwhile
                if is_version(path.name) and (path / "manifest.json").exists():
                    dated.append((path.stat().st_mtime, path.name))
        return [name for _, name in sorted(dated)]

    def alone(self) -> AbstractContextManager[None]:
        """Hold the folder's pruning lock, separate from that of records: a promotion does not wait for pruning."""
        return self._locked(".prune.lock")

    def hide(self, version: str) -> None:
        """Rename a version's folder to a scratch folder of this process."""
        hidden = self._root / f".{version}.{os.getpid()}{_REMOVED}"
        if (self._root / version).exists():
            shutil.rmtree(hidden, ignore_errors=True)  # of a killed process with this pid; published again since
        with suppress(FileNotFoundError):
            (self._root / version).rename(hidden)

    def hidden(self) -> list[str]:
        """Return the hidden versions, of any process, that were not published again."""
        hidden = {path.name[1:].rsplit(".", 2)[0] for path in self._root.glob(f".*.*{_REMOVED}")}
        return sorted(version for version in hidden if not (self._root / version).exists())

    def show(self, version: str) -> None:
        for path in [*self._root.glob(f".{escape(version)}.*{_REMOVED}")][:1]:
            path.rename(self._root / version)

    def sweep(self) -> None:
        """Delete the hidden versions of this process, and scratch folders older than a day."""
        before_s = time.time() - SCRATCH_KEPT_S
        for folder in self._root.glob(".*.*"):
            is_own = folder.name.endswith(f".{os.getpid()}{_REMOVED}")
            with suppress(FileNotFoundError):  # a finished publication
                if folder.is_dir() and (is_own or folder.stat().st_mtime < before_s):
                    shutil.rmtree(folder, ignore_errors=True)  # the next sweep deletes the rest

    def scratch(self, version: str) -> Path:
        """Return a scratch path of this process next to the versions.

        Leftovers of an earlier process with the same pid are deleted; containers reuse pids.
        """
        path = self._root / f".{version}.{os.getpid()}"
        shutil.rmtree(path, ignore_errors=True)
        return path

    def _record(self, name: str) -> Path:
        return self._root / "names" / f"{name}.json"

    @contextmanager
    def _locked(self, name: str = ".lock") -> Iterator[None]:
        self._root.mkdir(parents=True, exist_ok=True)
        with (self._root / name).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _from_pointer_files(self) -> bytes | None:
        """Return the default name's record from the four files of the older store format; None without them."""
        texts = {}
        for file in ("LIVE", "PREVIOUS", "REFERENCE", "WITHDRAWN"):
            with suppress(FileNotFoundError):
                texts[file] = (self._root / file).read_text()
        if not texts:
            return None
        live, previous = (texts.get(file, "").strip() or None for file in ("LIVE", "PREVIOUS"))
        reference, withdrawn = (texts.get(file, "null") for file in ("REFERENCE", "WITHDRAWN"))
        head = json.dumps({"live": live, "previous": previous, "owner": None, "history": []})[:-1]
        return f'{head}, "reference": {reference}, "withdrawn": {"{}" if withdrawn == "null" else withdrawn}}}'.encode()
