"""The reader of events and items: file -> named columns -> normalised rows -> accepted, or set aside with a reason.

All commands share it. It reads a table twice: once for facts of all its rows, then batch by batch, so a file of events
may exceed memory. Rows come in file order; a sort by time and `pipelines.tables.events.distinct` follow, for all events
at once or for a stretch of time.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import polars as pl

from pipelines.tables.columns import is_known, name_columns
from pipelines.tables.events import (
    EVENT_TYPES,
    distinct,
    note_times,
    read_events,
    refuse_empty,
    survey,
    survey_histories,
)
from pipelines.tables.files import Frame, Table
from pipelines.tables.findings import Findings
from pipelines.tables.items import HIDING, ITEM_TYPES, catalogue_items, merge_items, read_items, survey_items
from pipelines.tables.options import PLAIN, TableOptions

Keeps = Callable[[pl.DataFrame], pl.Series]
_ASIDE: dict[str, pl.DataType] = {"row": pl.Int64(), "reason": pl.String()}


def open_table(path: Path, kind: str, options: TableOptions) -> Table:
    """Open a file of this kind, events or items. Raises as `Table`."""
    return Table(path, options.headers.get(kind), is_known, may_grow=kind == "events")


class EventTable:
    """A table of events."""

    def __init__(self, table: Table | Frame, options: TableOptions = PLAIN) -> None:
        self.findings = Findings("events")
        self.table = table
        self.named = name_columns("events", table, options, self.findings)
        self._rejected: list[pl.DataFrame] = []
        self.is_newest_first = False
        """Whether the rows of each user are from new to old, known once all batches are read."""

    def batches(
        self, known: pl.Series | None = None, keeps: Keeps | None = None, refuse: pl.Expr | None = None
    ) -> Iterator[pl.DataFrame]:
        """Yield the accepted rows, in file order. Raises DataError if there are none.

        Args:
            known: Ids of items; rows of other items are set aside. None: all are accepted.
            keeps: Predicate over rows with user_id and event_time; other rows are ignored.
            refuse: Expression over accepted rows: the reason to set a row aside all the same, or null.
        """
        about = survey(self.table.batches(), self.named)
        about.refuse(self.named, self.table.name)
        if "history" in self.named.fields:
            survey_histories(self.table.batches(), self.named, about)
        num_accepted = 0
        for batch in self.table.batches():
            good, rejected = read_events(batch, self.named, about, self.findings, known, keeps, refuse)
            self._rejected.append(rejected)
            num_accepted += good.height
            yield good
        self.is_newest_first = about.is_newest_first
        note_times(about, self.findings)
        if keeps is None or self.findings.num_rows:
            refuse_empty(self.findings, self.table.name, self.named, num_accepted, known)

    def read(self, known: pl.Series | None = None, keeps: Keeps | None = None) -> pl.DataFrame:
        """Return all accepted rows without exact duplicates, in file order, or in reverse if it is newest first."""
        parts = [*self.batches(known, keeps)]
        events = distinct(pl.concat(parts) if parts else pl.DataFrame(schema=EVENT_TYPES), self.findings)
        return events.sort("row", descending=True, maintain_order=True) if self.is_newest_first else events

    @property
    def rejected(self) -> pl.DataFrame:
        """The rows set aside so far, as text, with `row` and `reason`."""
        return _joined(self.table.columns, self._rejected)


class ItemTable:
    """A table of items. All of them are in memory at once, as in each gateway."""

    def __init__(self, table: Table | Frame, options: TableOptions = PLAIN) -> None:
        self.findings = Findings("items")
        self.table = table
        self._options = options
        self.named = name_columns("items", table, options, self.findings)
        self._rejected: list[pl.DataFrame] = []

    def read(self) -> pl.DataFrame:
        """Return a row per item, in order of first occurrence. Raises DataError if there is none."""
        table, findings, rejected_before = self.table, self.findings, set[int]()
        about = survey_items(table.batches(), self.named, is_exact=table.is_exact)
        if about.ids is not None:
            about.ids.refuse(self.named.column("item_id"), table.name, "'i42'")
        parts = []
        for batch in table.batches():
            good, rejected = read_items(
                batch, self.named, self._options, table.sequences, about, findings, rejected_before
            )
            parts.append(good)
            self._rejected.append(rejected)
        refuse_empty(findings, table.name, self.named, sum(part.height for part in parts))
        items = pl.concat(parts, how="diagonal_relaxed") if parts else pl.DataFrame(schema=ITEM_TYPES)
        return merge_items(items, findings)

    def read_catalogue(self) -> pl.DataFrame:
        """Return (item_id, title, categories, text), as models learn from them."""
        items = self.read()
        if hiding := [self.named.column(name) for name in HIDING if name in self.named.fields]:
            what = f"{' and '.join(hiding)} hide items only in the live catalogue: `tailrace import items` reads them"
            self.findings.note(what)
        return catalogue_items(items, self.named)

    @property
    def rejected(self) -> pl.DataFrame:
        """The rows set aside so far, as text, with `row` and `reason`."""
        return _joined(self.table.columns, self._rejected)


def _joined(columns: Sequence[str], parts: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Return rows set aside as one table, which has all columns of their file even without rows."""
    schema = _ASIDE | dict.fromkeys((name for name in columns if name not in _ASIDE), pl.String())
    return pl.concat([pl.DataFrame(schema=schema), *parts], how="diagonal")
