"""An import from file to topic: read the table, order its rows, and send the rows that were not delivered before.

It knows neither the command line nor the broker: `send` returns when records are durable.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from pipelines.data.erased import keeps_unerased
from pipelines.imports.delivered import Delivered, LiveCatalogue, Send
from pipelines.imports.importing import Import, ImportResult, row_hashes
from pipelines.imports.old_events import OldEvents
from pipelines.imports.ordered import OrderedEvents
from pipelines.imports.records import interactions, item_changes, untimely
from pipelines.tables.columns import check_used
from pipelines.tables.events import distinct
from pipelines.tables.findings import Findings
from pipelines.tables.items import ATTRIBUTE
from pipelines.tables.options import TableOptions
from pipelines.tables.reader import EventTable, ItemTable, open_table
from services.contracts.events import MAX_EVENT_AGE_MS
from services.stream.log.ledger import ErasureLedger

_DAY_MS = 86_400_000
ERASED = "{n} from before the erasure of their user are not imported"
LEFT = "{n} of an earlier import are not in the table and stay live; --delete-missing deletes them"
DELETED = "{n} of an earlier import are not in the table and are deleted"
KEPT = (
    "{n} of an earlier import are not in the table and stay live, because rows are set aside; mend the rows, then "
    "--delete-missing deletes them"
)
LOST = "{n} of an earlier import were lost with the broker and are sent again"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportRun:
    """The table of one import, its destination, and its progress file.

    Args:
        path: The file.
        options: How it is read.
        send: Returns once a batch is durable. Raises DependencyUnavailable.
        progress_file: File that records the progress.
        scratch: A folder for parts of a large table.
        erasures: The erasures of users, whose earlier events are not imported again.
        moved: Called after each batch with the number of rows delivered.
    """

    path: Path
    options: TableOptions
    send: Send
    progress_file: Path
    scratch: Path
    erasures: ErasureLedger | None = None
    moved: Callable[[int], object] = id


def open_items(path: Path, options: TableOptions) -> ItemTable:
    """Open a table of items. Raises DataError, or ConfigError for an option that matches no column."""
    table = ItemTable(open_table(path, "items", options), options)
    check_used(options, [("items", table.table, table.named)])
    return table


def import_items(
    run: ImportRun,
    delivered_file: Path,
    catalogue: LiveCatalogue,
    *,
    again: bool = False,
    delete_missing: bool = False,
) -> tuple[ImportResult, Findings]:
    """Import the items whose row is new or has changed, or all; return outcome and findings.

    Only the fields of the table's columns change, and of the columns that it had before. `delivered_file` records the
    items of this source. Items that have left it are noted, or deleted on request unless a row is set aside, which may
    be theirs.

    Raises DataError, ConfigError, DependencyUnavailable.
    """
    table = open_items(run.path, run.options)
    items = table.read().drop("text")
    columns = [name for name in items.columns if name in table.named.fields or name.startswith(ATTRIBUTE)]
    items = items.select("row", *columns)
    before, now = Delivered.read(delivered_file), dict(zip(items["item_id"], row_hashes(items), strict=True))
    missing, lost = before.missing(now, catalogue), before.lost(catalogue)
    is_due = [again or item_id in lost or before.hashes.get(item_id) != row for item_id, row in now.items()]
    due = items.filter(pl.Series(is_due, dtype=pl.Boolean))
    due = due.with_columns(pl.lit(None).alias(name) for name in sorted(before.columns.difference(columns)))
    deletes = delete_missing and not table.findings.num_set_aside
    what = DELETED if deletes else KEPT if delete_missing else LEFT
    table.findings.note(what, len(missing), missing[0] if missing else "")
    if lost:
        table.findings.note(LOST, len(lost & now.keys()), min(lost))
        run.progress_file.unlink(missing_ok=True)  # of another topic
    unsure = dict.fromkeys(due["item_id"])
    all_columns, topic_id = before.columns.union(columns), before.topic_id or catalogue.topic_id
    Delivered({**before.hashes, **unsure}, all_columns, topic_id).write(delivered_file)

    def deliver(batch: pl.DataFrame) -> None:
        run.send(catalogue.records(item_changes(batch)))

    sent = Import(lambda: [due], deliver, run.moved, run.progress_file).run()
    catalogue.settle(unsure, run.send)
    if deletes:
        run.send([(item_id.encode(), None) for item_id in missing])
    run.progress_file.unlink(missing_ok=True)
    hashes = now if deletes else {**before.hashes, **now}
    Delivered(hashes, frozenset(columns), catalogue.topic_id).write(delivered_file)
    num_before = items.height - due.height + sent.num_before
    return ImportResult(num_rows=items.height, num_before=num_before, is_again=False), table.findings


def import_events(run: ImportRun, old: OldEvents | None, now_ms: int) -> tuple[ImportResult, Findings]:
    """Import events in order of time; those too old for the stream go to `old` or are set aside.

    Raises as `import_items`.
    """
    table = EventTable(open_table(run.path, "events", run.options), run.options)
    check_used(run.options, [("events", table.table, table.named)])
    since_ms = now_ms - MAX_EVENT_AGE_MS + _DAY_MS  # events are read some time after they are sent
    refuse = untimely(now_ms, since_ms if old is None else None)
    ordered = OrderedEvents(run.scratch, table.batches(refuse=refuse))

    def deliver(batch: pl.DataFrame) -> None:
        if (keeps := keeps_unerased(run.erasures)) is not None:  # again for each batch: users are erased meanwhile
            is_kept = keeps(batch)
            table.findings.note(ERASED, int((~is_kept).sum()))
            batch = batch.filter(is_kept)
        is_old = pl.col("event_time").dt.epoch("ms") < since_ms
        if old is not None:
            old.add(interactions(batch.filter(is_old)))
        run.send([(event.key, event.encode()) for event in interactions(batch.filter(~is_old))])

    table_findings, num_passes = table.findings, 0

    def rows() -> Iterator[pl.DataFrame]:
        nonlocal num_passes
        num_passes += 1
        findings = table_findings if num_passes == 1 else Findings("events")  # duplicates are counted once
        stretches = ordered.stretches(is_newest_first=table.is_newest_first)
        return (distinct(stretch, findings) for stretch in stretches)

    outcome = Import(rows, deliver, run.moved, run.progress_file).run()
    ordered.remove()
    return outcome, table_findings
