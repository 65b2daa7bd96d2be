"""The files of the offline log by name: the offsets in each, superseded files, and the files to merge next. Pure.

A file's tier is the power of four that its size has reached. The files of a tier and below are merged if there are many
of them and together they make a file of a higher tier; so an event is rewritten at most once per tier, seven times in
all, and a partition ends with few files however slowly its events arrive. What is left of a day that has ended is
merged once more, since a reader of one user looks into every file.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"(\d{20})-(\d{20})\.parquet")
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")
TIERS = 7
FULL_SIZE = 4**TIERS
"""Maximum size of a merged file, which bounds the work of one merge."""
MIN_FILES = 32
MAX_FILES = 64


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """The offsets of one file, both ends included. Unreadable records leave gaps, so it may hold fewer events."""

    first: int
    last: int

    @property
    def size(self) -> int:
        """The maximum number of events."""
        return self.last - self.first + 1

    @property
    def name(self) -> str:
        """The file's name; names sort like spans."""
        return f"{self.first:020d}-{self.last:020d}.parquet"


def span_of(path: Path) -> Span | None:
    """Read a span from a file's name; None for other files."""
    match = _NAME.fullmatch(path.name)
    return Span(int(match[1]), int(match[2])) if match else None


def topic_folder(path: Path) -> Path:
    """Return the folder of a file's topic: the file's folder, or the parent of its day's folder."""
    return path.parent.parent if _DAY.fullmatch(path.parent.name) else path.parent


def current(spans: Iterable[Span]) -> list[Span]:
    """Return in order the spans that no other span contains: together they hold everything, each event once."""
    kept: list[Span] = []
    for span in sorted(set(spans), key=lambda span: (span.first, -span.last)):
        if not kept or span.last > kept[-1].last:
            kept.append(span)
    return kept


def current_files(paths: Iterable[Path]) -> list[Path]:
    """Return the files in name order, without files superseded by a larger file in the same folder."""
    files = sorted(paths)
    by_folder: dict[Path, list[Span]] = {}
    for path in files:
        if span := span_of(path):
            by_folder.setdefault(path.parent, []).append(span)
    kept = {folder: set(current(spans)) for folder, spans in by_folder.items()}
    return [path for path in files if (span := span_of(path)) is None or span in kept[path.parent]]


def choose_merge(
    spans: Sequence[Span], unreadable: Collection[Span] = (), *, has_ended: bool = False
) -> tuple[Span, ...]:
    """Return the oldest neighbours that are worth merging, smallest tier first; may be empty. `spans` are in order.

    Of a day that `has_ended`, all that fit into one file. A merge never spans an unreadable file: readers
    would take that file for merged, though its events are not in the result.
    """
    for tier in range(TIERS):
        for run in _runs_below(spans, 4 ** (tier + 1), unreadable):
            if merged := _worth(_head(run), 4 ** (tier + 1)):
                return merged
    if has_ended:
        for run in _runs_below(spans, FULL_SIZE, unreadable):
            heads = (_head(run[first:]) for first in range(len(run)))
            if merged := next((head for head in heads if len(head) > 1), ()):
                return merged
    return ()


def _runs_below(spans: Sequence[Span], size: int, unreadable: Collection[Span]) -> Iterator[list[Span]]:
    """Split the spans into runs of neighbours smaller than `size`, without an unreadable file in between."""
    run: list[Span] = []
    for span in spans:
        if run and any(run[-1].last < gap.first and gap.last < span.first for gap in unreadable):
            yield run
            run = []
        if span.size < size:
            run.append(span)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _head(run: list[Span]) -> tuple[Span, ...]:
    """Return the first spans of a run that together fit in one full file."""
    head = run[:MAX_FILES]
    while head and Span(head[0].first, head[-1].last).size > FULL_SIZE:
        head.pop()
    return tuple(head)


def _worth(head: tuple[Span, ...], higher: int) -> tuple[Span, ...]:
    size = Span(head[0].first, head[-1].last).size if head else 0
    is_many = len(head) >= MIN_FILES or (len(head) > 1 and size >= FULL_SIZE // 2)
    return head if is_many and size >= higher else ()
