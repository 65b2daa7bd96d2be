"""The names of the offline log's files: which offsets each holds, and which a larger one has made superfluous. Pure."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"(\d{20})-(\d{20})\.parquet")


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """The offsets of one file, both ends included. What could not be read leaves gaps, so it may hold fewer events."""

    first: int
    last: int

    @property
    def size(self) -> int:
        """The most events that it can hold."""
        return self.last - self.first + 1

    @property
    def name(self) -> str:
        """The file's name; names sort as spans do."""
        return f"{self.first:020d}-{self.last:020d}.parquet"


def span_of(path: Path) -> Span | None:
    """Read a span from a file's name; None when it is not a file of the log."""
    found = _NAME.fullmatch(path.name)
    return Span(int(found[1]), int(found[2])) if found else None


def current(spans: Iterable[Span]) -> list[Span]:
    """Return in order the spans that lie in no other: together they hold everything, each event once."""
    kept: list[Span] = []
    for span in sorted(set(spans), key=lambda one: (one.first, -one.last)):
        if not kept or span.last > kept[-1].last:
            kept.append(span)
    return kept


def current_files(paths: Iterable[Path]) -> list[Path]:
    """Leave out, folder by folder, the files of the log that a larger one has made superfluous; in name order."""
    files = sorted(paths)
    by_folder: dict[Path, list[Span]] = {}
    for path in files:
        if span := span_of(path):
            by_folder.setdefault(path.parent, []).append(span)
    kept = {folder: set(current(spans)) for folder, spans in by_folder.items()}
    return [path for path in files if (span := span_of(path)) is None or span in kept[path.parent]]
