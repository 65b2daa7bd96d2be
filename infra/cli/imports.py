"""`tailrace import`: a shop's tables into the live catalogue and the log of events. What is read and resumed is in pipelines.imports."""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console

from infra.cli.audit import audited
from infra.cli.topic import running_settings, topic_sender
from services.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from pipelines.imports.values import Columns
    from services.contracts.events import Interaction
    from services.settings.settings import Settings

import_app = typer.Typer(
    no_args_is_help=True,
    help="Import items and events from files, object stores and databases. A killed import goes on where it was; a second one changes nothing.",
)
out = Console(highlight=False, soft_wrap=True)

Source = Annotated[
    str,
    typer.Argument(
        help="CSV, Parquet or JSON Lines on disk or at s3://, gs://, az://; or sqlite:///PATH, postgresql://HOST/NAME.",
        show_default=False,
    ),
]
Query = Annotated[str | None, typer.Option(help="SQL that selects the rows of a database, with an ORDER BY.")]
Column = Annotated[list[str] | None, typer.Option(help="FIELD=COLUMN where the source's name differs; repeat it.")]
Again = Annotated[bool, typer.Option(help="Import all rows again, whatever was imported before.")]

_NUM_SHOWN = 10
_DAY_MS = 86_400_000
Read = TypeVar("Read")


@import_app.command()
def items(
    source: Source,
    query: Query = None,
    column: Column = None,
    number: Annotated[list[str] | None, typer.Option(help="A CSV column that is a number; repeat it.")] = None,
    flag: Annotated[list[str] | None, typer.Option(help="A CSV column that is true or false; repeat it.")] = None,
    again: Again = False,
    first_bundle: Annotated[
        bool, typer.Option(help="Where nothing is live, also publish a bundle of these items, without models.")
    ] = False,
) -> None:
    """Import items into the live catalogue. Columns that are no field of items are attributes."""
    from pipelines.imports.values import Columns, item_of

    settings = running_settings()
    columns = Columns(names=_names(column), numbers=frozenset(number or ()), flags=frozenset(flag or ()))
    with audited(settings.state_dir, "import items"):
        if first_bundle:
            _publish_first(settings, source, query, columns)
        with topic_sender(settings, settings.items_topic) as send:
            _run(
                settings,
                ("items", source, query, ""),
                columns,
                lambda row: item_of(row, columns),
                lambda states: send([(one.key, one.encode()) for one in states]),
                again=again,
            )


@import_app.command()
def events(
    source: Source,
    query: Query = None,
    column: Column = None,
    table: Annotated[
        Path | None,
        typer.Option(help="Parquet file for events that are too old for the stream, for `tailrace pipeline --events`."),
    ] = None,
    again: Again = False,
) -> None:
    """Import events into the stream; those of more than 29 days ago into a table for the pipeline."""
    from pipelines.imports.old_events import OldEvents
    from pipelines.imports.values import Columns, event_of
    from services.contracts.events import MAX_EVENT_AGE_MS

    settings, columns = running_settings(), Columns(names=_names(column))
    now_ms = time.time_ns() // 1_000_000
    since_ms = now_ms - MAX_EVENT_AGE_MS + _DAY_MS  # what is sent is read later than now
    old = None if table is None else OldEvents(table)

    def read(row: dict[str, Any]) -> "Interaction":
        event = event_of(row, columns)
        if event.event_time_ms >= since_ms:
            event.check_time(now_ms)
        elif old is None:
            raise InvalidRequest(columns.of("event_time"), "too old for the stream", "give --table FILE for old events")
        return event

    with audited(settings.state_dir, "import events"), topic_sender(settings, settings.interactions_topic) as send:

        def deliver(read_events: "Sequence[Interaction]") -> None:
            if old is not None:
                old.add([one for one in read_events if one.event_time_ms < since_ms])
            send([(one.key, one.encode()) for one in read_events if one.event_time_ms >= since_ms])

        _run(settings, ("events", source, query, str(table or "")), columns, read, deliver, again=again)
    if old is not None and (num_old := old.finish()):
        out.print(
            f"{table} holds {num_old} events; train on them with `tailrace pipeline --events {table}`", markup=False
        )


def _run(
    settings: "Settings",
    what: tuple[str, str, str | None, str],
    columns: "Columns",
    read: Callable[[dict[str, Any]], Read],
    deliver: Callable[[Sequence[Read]], None],
    *,
    again: bool,
) -> None:
    """Run an import of this kind, source, query and table of old events, with its progress on the terminal."""
    from pipelines.imports.importing import Import, Refused, progress_file
    from pipelines.imports.sources import name_of, read_rows

    kind, source, query, table = what
    folder = settings.state_dir / "imports"
    progress = progress_file(folder, kind, name_of(source, query), (columns, table))
    if again:
        progress.unlink(missing_ok=True)
    num_shown = 0

    def open_rows() -> Iterator[dict[str, Any]]:
        for place, row in enumerate(read_rows(source, query, folder / "downloads")):
            if not place:
                columns.check(row, kind)
            yield row

    def refuse(one: Refused) -> None:
        nonlocal num_shown
        num_shown += 1
        if num_shown <= _NUM_SHOWN:
            out.print(f"left out: {one}", markup=False)

    with out.status(f"{kind}: reading") as status:
        done = Import(
            open_rows, read, deliver, refuse, lambda rows: status.update(f"{kind}: {rows} rows"), progress
        ).run()
    shutil.rmtree(folder / "downloads", ignore_errors=True)
    if num_shown > _NUM_SHOWN:
        out.print(f"left out: {num_shown - _NUM_SHOWN} more rows", markup=False)
    began = "the source is another than before, so all of it was imported; " if done.is_again else ""
    before = f", {done.num_before} of them before this run" if done.num_before else ""
    left_out = f", {done.num_refused} left out" if done.num_refused else ""
    out.print(f"{began}{kind}: {done.num_rows} rows{before}{left_out}", markup=False)


def _publish_first(settings: "Settings", source: str, query: str | None, columns: "Columns") -> None:
    """Publish a bundle of these items, unless one is live."""
    import polars as pl

    from models.registry import BundleStore
    from pipelines.imports.sources import name_of, read_rows
    from pipelines.imports.values import catalogue_row
    from pipelines.publication.cold_start import publish_items

    store = BundleStore.of(settings, settings.first_name)
    if store.live_version() is not None:
        return
    read = []
    for place, row in enumerate(read_rows(source, query, settings.state_dir / "imports" / "downloads")):
        if not place:
            columns.check(row, "items")
        read.append(catalogue_row(row, columns))
    frame = pl.DataFrame(read, infer_schema_length=None)
    name = Path(name_of(source, None)).name
    bundle = publish_items(store, frame, name, datetime.now(UTC), partial(out.print, markup=False))
    out.print(
        f"{bundle.version} is live with {bundle.manifest.get('num_items')} items and no models: popular and similar items are answered",
        markup=False,
    )


def _names(options: list[str] | None) -> dict[str, str]:
    named = {}
    for option in options or ():
        name, separator, column = option.partition("=")
        if not (separator and name and column):
            raise ConfigError(f"--column: {option!r} names no field and column; give for example item_id=sku")
        named[name] = column
    return named
