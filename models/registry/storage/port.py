"""The interface that a store of bundles requires from its storage."""

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol


class StoredRecord(NamedTuple):
    """A record's bytes, and the mark that proves a writer's read; both None without a record."""

    content: bytes | None
    mark: str | None


class OpenedFolder(NamedTuple):
    """The folder of a version, and the object that keeps it on this machine while it is referenced."""

    path: Path
    hold: object = None


class Storage(Protocol):
    """Immutable versions, and records by name that change by compare-and-swap."""

    @property
    def is_lost(self) -> bool:
        """Whether the storage did not answer the last request."""
        ...

    def read_record(self, name: str) -> StoredRecord:
        """Return a name's record. One small read. Raises StoreUnavailable."""
        ...

    def marks(self, names: Collection[str]) -> Mapping[str, str]:
        """Return the marks of these names, except of a name without a readable record. Raises StoreUnavailable."""
        ...

    def keep_record(self, name: str, content: bytes) -> None:
        """Keep a valid record of a name on this machine, if records are stored elsewhere."""
        ...

    def kept_record(self, name: str) -> bytes | None: ...

    def swap_record(self, name: str, seen: str | None, content: bytes) -> bool:
        """Replace a name's record if its mark is still `seen` (None: no record yet); return whether it was.

        Raises StoreUnavailable.
        """
        ...

    def names(self) -> list[str]:
        """Return the names that have a record, in order. Raises StoreUnavailable."""
        ...

    def add(self, folder: Path, version: str) -> None:
        """Add a finished folder as this version.

        It becomes visible whole or not at all; an existing version is kept. Raises StoreUnavailable or OSError.
        """
        ...

    def folder_of(self, version: str) -> OpenedFolder:
        """Return the folder of a version on this machine, after downloading it if needed.

        Raises BundleNotFound, BundleCorrupt or StoreUnavailable.
        """
        ...

    def manifest_folder_of(self, version: str, with_report: bool = False) -> Path:
        """Return a folder of the version with its manifest and, on request, its report; other files may be absent.

        Raises BundleNotFound, BundleCorrupt or StoreUnavailable.
        """
        ...

    def versions(self) -> list[str]:
        """Return the versions that are not hidden, in order of publication. Raises StoreUnavailable."""
        ...

    def alone(self) -> AbstractContextManager[None]:
        """Hold the exclusive lock shared by pruning and the commit step of `add`.

        So no holder acts on stale reads. Blocks until acquired. Raises StoreUnavailable.
        """
        ...

    def hide(self, version: str) -> None:
        """Hide a version, if it exists, so that no reader opens it. `show` undoes that until `sweep`."""
        ...

    def hidden(self) -> list[str]:
        """Return the versions that any process has hidden. Raises StoreUnavailable."""
        ...

    def show(self, version: str) -> None:
        """Show a hidden version again, at its place in the order of publication."""
        ...

    def sweep(self) -> None:
        """Delete hidden versions, and leftovers of killed processes older than a day.

        Raises StoreUnavailable, also if the lock of `alone` was lost.
        """
        ...

    def scratch(self, version: str) -> Path:
        """Return an unused path of this process for preparing a version."""
        ...
