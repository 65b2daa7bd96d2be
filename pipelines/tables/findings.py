"""Changes, duplicates and rejected rows of one table, counted batch by batch, for every command."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

NUM_SAMPLES = 5
_NUM_ROWS_NAMED = 10


@dataclass(frozen=True, slots=True)
class Note:
    """A change or oddity of a table (`kind` is events, items or live log), with an example that may name a user."""

    kind: str
    what: str
    example: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}" + (f", such as {self.example}" if self.example else "")


@dataclass(slots=True)
class SetAside:
    """The rows with one reason: count, first row numbers, and samples of their columns as text."""

    num_rows: int = 0
    rows: list[int] = field(default_factory=list)
    samples: list[Mapping[str, str | None]] = field(default_factory=list)

    def add(self, rows: Sequence[int], samples: Iterable[Mapping[str, str | None]]) -> None:
        """Count more rows."""
        self.num_rows += len(rows)
        self.rows += rows[: _NUM_ROWS_NAMED - len(self.rows)]
        self.samples += [*samples][: NUM_SAMPLES - len(self.samples)]


@dataclass(slots=True)
class Findings:
    """The findings of one table so far.

    Attributes:
        kind: events or items.
        num_rows: Rows read, including rows set aside.
        set_aside: Unusable rows, by reason.
        num_duplicates: Exact duplicates, which are dropped.
        num_unread: Unreadable cells, by column; their rows are kept.
    """

    kind: str
    num_rows: int = 0
    set_aside: dict[str, SetAside] = field(default_factory=dict)
    num_duplicates: int = 0
    num_unread: dict[str, int] = field(default_factory=dict)
    _notes: dict[str, tuple[int, str]] = field(default_factory=dict)

    def note(self, what: str, count: int = 1, example: str = "") -> None:
        """Count a change. `what` contains `{n}` for the count."""
        if count:
            before, first = self._notes.get(what, (0, example))
            self._notes[what] = before + count, first or example

    def unread(self, column: str, count: int, example: str, fix: str = "") -> None:
        """Count unreadable cells. `fix` says what to write in a column that decides whether an item is shown."""
        if count:
            self.num_unread[column] = self.num_unread.get(column, 0) + count
            hidden = (
                f"column {column}: write {fix}; {{n}} items count as unavailable, since their values cannot be read"
            )
            dropped = f"{{n}} values of column {column} cannot be read and are dropped"
            self.note(hidden if fix else dropped, count, example)

    def reject(self, reason: str, rows: Sequence[int], samples: Iterable[Mapping[str, str | None]] = ()) -> None:
        """Count rows set aside."""
        if rows:
            self.set_aside.setdefault(reason, SetAside()).add(rows, samples)

    @property
    def num_set_aside(self) -> int:
        return sum(group.num_rows for group in self.set_aside.values())

    @property
    def notes(self) -> list[Note]:
        """The changes, each with its count and an example."""
        return [
            Note(self.kind, what.replace("{n}", str(count)), example) for what, (count, example) in self._notes.items()
        ]

    def describe_set_aside(self) -> list[str]:
        """Return a sentence for each reason: count, row numbers and an example row."""
        return [describe_reason(self.kind, reason, group) for reason, group in self.set_aside.items()]

    def sentences(self) -> list[str]:
        return [*map(str, self.notes), *self.describe_set_aside()]


def describe_reason(kind: str, reason: str, group: SetAside) -> str:
    """Return a sentence on the rows set aside for one reason."""
    more = ", ..." if group.num_rows > len(group.rows) else ""
    named = f"{'row' if group.num_rows == 1 else 'rows'} {', '.join(map(str, group.rows))}{more}" if group.rows else ""
    example = f", such as {describe_row(group.samples[0])}" if group.samples else ""
    return f"{kind}: {group.num_rows} set aside ({reason}){example}" + (f"; {named}" if named else "")


def describe_row(sample: Mapping[str, Any]) -> str:
    """Return a row's cells on one line."""
    cells = {column: " ".join(str(value).split()) for column, value in sample.items()}
    return ", ".join(f"{column}={cell}" for column, cell in cells.items() if column not in ("reason", "row"))
