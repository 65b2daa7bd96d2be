"""What a store of bundles needs from the place where it is kept."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol


class Stored(NamedTuple):
    """A record's bytes, and the mark by which a later writer shows that it saw them; both None where there is no record yet."""

    content: bytes | None
    mark: str | None


class Storage(Protocol):
    """Versions, which do not change, and records by name, which are replaced by compare-and-swap."""

    @property
    def is_lost(self) -> bool:
        """Whether the place did not answer when it was last asked."""
        ...

    def read_record(self, name: str) -> Stored:
        """Return a name's record. One small read. Raises StoreUnavailable."""
        ...

    def keep_record(self, name: str, content: bytes) -> None:
        """Keep a valid record of a name on this machine, where records are elsewhere."""
        ...

    def kept_record(self, name: str) -> bytes | None:
        """Return the record that was kept last; None without one."""
        ...

    def swap_record(self, name: str, seen: str | None, content: bytes) -> bool:
        """Replace a name's record where its mark is still `seen` (None: there is none yet); whether that was so. Raises StoreUnavailable."""
        ...

    def names(self) -> list[str]:
        """Return the names that have a record, in order. Raises StoreUnavailable."""
        ...

    def add(self, folder: Path, version: str) -> None:
        """Add a finished folder as this version: visible whole or not at all; an existing version is kept. Raises StoreUnavailable or OSError."""
        ...

    def folder_of(self, version: str) -> Path:
        """Return the folder in which a version is read on this machine, brought here first where it must be. Raises BundleNotFound, BundleCorrupt or StoreUnavailable."""
        ...

    def manifest_folder_of(self, version: str, with_report: bool = False) -> Path:
        """Return a folder of the version's name that has its manifest, and the report where it is asked for; it may have nothing else. Raises BundleNotFound, BundleCorrupt or StoreUnavailable."""
        ...

    def versions(self) -> list[str]:
        """Return the versions that are not hidden, the one that was published first before the others. Raises StoreUnavailable."""
        ...

    def alone(self) -> AbstractContextManager[None]:
        """Hold the lock of what removes versions, and of the last step of `add`: so no pruning acts on what it saw before a publication, or another pruning. Waits for it. Raises StoreUnavailable."""
        ...

    def hide(self, version: str) -> None:
        """Take a version away, if it is there, so that no reader opens it. `show` undoes that until `sweep`."""
        ...

    def hidden(self) -> list[str]:
        """Return the versions that any process has hidden. Raises StoreUnavailable."""
        ...

    def show(self, version: str) -> None:
        """Bring a hidden version back, to its place in the order of publication."""
        ...

    def sweep(self) -> None:
        """Remove what is hidden, and what killed processes left a day ago. Raises StoreUnavailable, also where `alone` was lost."""
        ...

    def scratch(self, version: str) -> Path:
        """Return a path of this process on which a version may be prepared; nothing is there."""
        ...
