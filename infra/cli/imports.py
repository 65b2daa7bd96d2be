"""`tailrace import`: a shop's tables into the live catalogue and the event log, and recommenders trained elsewhere.

pipelines.tables reads the tables; pipelines.imports resumes imports. One import of a state folder runs at a time, since
imports share scratch files.
"""

import shutil
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.status import Status

from infra.cli.options import with_options
from infra.cli.session import audited, check_output, out, running_settings
from infra.kafka.sender import topic_sender
from pipelines.foreign.options import ImportArguments
from pipelines.tables.options import ColumnArguments, ItemArguments

if TYPE_CHECKING:
    from pipelines.imports.delivered import Send
    from pipelines.imports.importing import ImportResult
    from pipelines.imports.run import ImportRun
    from pipelines.tables.findings import Findings
    from pipelines.tables.reader import ItemTable
    from services.settings.settings import Settings

import_app = typer.Typer(
    no_args_is_help=True,
    help="Import items and events from files, object stores and databases, or a recommender. "
    "A killed import resumes; a repeated import changes nothing.",
)

Source = Annotated[
    str,
    typer.Argument(
        help="Table on disk or at s3://, gs://, az://: CSV and other separated text, JSON, Parquet, also as .gz; "
        "or sqlite:///PATH, postgresql://HOST/NAME.",
        show_default=False,
    ),
]
Query = Annotated[str | None, typer.Option(help="SQL that selects the rows of a database, with an ORDER BY.")]
Again = Annotated[bool, typer.Option(help="Import all rows again.")]


@import_app.command()
@with_options
def items(
    source: Source,
    tables: ItemArguments,
    query: Query = None,
    again: Again = False,
    delete_missing: Annotated[
        bool, typer.Option(help="Delete items of earlier imports of this source that it no longer has.")
    ] = False,
    first_bundle: Annotated[
        bool, typer.Option(help="If no bundle is live, also publish a bundle of these items, without models.")
    ] = False,
) -> None:
    """Import items into the live catalogue. Columns that are not fields of items become attributes."""
    from pipelines.imports.following import following_catalogue
    from pipelines.imports.importing import progress_file
    from pipelines.imports.run import import_items, open_items
    from pipelines.imports.sources import name_of
    from pipelines.runner.run_lock import run_lock

    settings = running_settings()
    options = tables.parsed("items")
    with audited(settings.state_dir, "import items"), run_lock(settings.imports_dir, out):
        path = _fetched(settings, source, query)
        with (
            topic_sender(settings, settings.items_topic) as send,
            following_catalogue(settings) as catalogue,
            out.status("items") as status,
        ):
            run = _run(settings, ("items", source, query, (options,)), path, send, status, again=again)
            delivered = progress_file(settings.imports_dir, "delivered", name_of(source, query), "")
            outcome, findings = import_items(run, delivered, catalogue, again=again, delete_missing=delete_missing)
        if first_bundle:  # now that hidden items are known
            _publish_first(settings, open_items(path, options))
        shutil.rmtree(_scratch(settings), ignore_errors=True)
    _report(outcome, findings)


@import_app.command()
@with_options
def events(
    source: Source,
    columns: ColumnArguments,
    query: Query = None,
    table: Annotated[
        Path | None,
        typer.Option(help="Parquet file for events that are too old for the stream, for `tailrace pipeline --events`."),
    ] = None,
    again: Again = False,
) -> None:
    """Import events into the stream, in order of time; events older than 29 days go to a table for the pipeline."""
    from pipelines.imports.old_events import OldEvents
    from pipelines.imports.run import import_events
    from pipelines.runner.run_lock import run_lock

    check_output(Path(source), table=table)
    settings = running_settings()
    options = columns.parsed("events")
    with audited(settings.state_dir, "import events"), run_lock(settings.imports_dir, out):
        old = None if table is None else OldEvents(table)
        path = _fetched(settings, source, query)
        with topic_sender(settings, settings.interactions_topic) as send, out.status("events: reading") as status:
            about = "events", source, query, (options, str(table or ""))
            run = _run(settings, about, path, send, status, again=again)
            outcome, findings = import_events(run, old, time.time_ns() // 1_000_000)
        num_old = 0 if old is None else old.finish()
        shutil.rmtree(_scratch(settings), ignore_errors=True)
    _report(outcome, findings)
    if num_old:
        out.print(
            f"{table} holds {num_old} events; train on them with `tailrace pipeline --events {table}`", markup=False
        )


@import_app.command()
@with_options
def model(
    checkpoint: Annotated[
        Path, typer.Argument(help="Checkpoint folder in Hugging Face layout, or of a LoRA adapter.", show_default=False)
    ],
    arguments: ImportArguments,
) -> None:
    """Import a generative recommender: check it, prove its prompt on examples, and compare scores and strides."""
    from pipelines.foreign.model import import_model

    settings, options = running_settings(), arguments.of(checkpoint)
    with audited(settings.state_dir, "import model", model=options.import_name):
        import_model(options, settings.state_dir, partial(out.print, markup=False))


def _fetched(settings: "Settings", source: str, query: str | None) -> Path:
    from pipelines.imports.sources import local_file

    return local_file(source, query, _scratch(settings) / "downloads")


def _scratch(settings: "Settings") -> Path:
    from services.stream.erasure.tables import SCRATCH

    return settings.imports_dir / SCRATCH


def _run(
    settings: "Settings",
    what: tuple[str, str, str | None, Sequence[object]],
    path: Path,
    send: "Send",
    status: Status,
    *,
    again: bool,
) -> "ImportRun":
    from pipelines.imports.importing import progress_file
    from pipelines.imports.run import ImportRun
    from pipelines.imports.sources import name_of
    from services.stream.log.ledger import ErasureLedger

    kind, source, query, options = what
    progress = progress_file(settings.imports_dir, kind, name_of(source, query), options)
    if again:
        progress.unlink(missing_ok=True)
    return ImportRun(
        path=path,
        options=options[0],  # type: ignore[arg-type]
        send=send,
        progress_file=progress,
        scratch=_scratch(settings) / "ordered",
        erasures=ErasureLedger(settings.offline_log_dir),
        moved=lambda rows: status.update(f"{kind}: {rows} rows"),
    )


def _report(done: "ImportResult", findings: "Findings") -> None:
    for sentence in findings.sentences():
        out.print(sentence, markup=False)
    began = "the source changed, so all of its rows were imported; " if done.is_again else ""
    parts = [f"{findings.num_rows} rows"]
    if findings.num_set_aside:
        parts.append(f"{findings.num_set_aside} set aside")
    if done.num_rows != findings.num_rows:
        parts.append(f"{done.num_rows} {findings.kind}")
    if done.num_before:
        parts.append(f"{done.num_before} of them before this run")
    out.print(f"{began}{findings.kind}: {', '.join(parts)}", markup=False)


def _publish_first(settings: "Settings", table: "ItemTable") -> None:
    """Publish a bundle of these items, unless one is live."""
    from models.registry.store import BundleStore
    from pipelines.publication.cold_start import describe, publish_items

    store = BundleStore.of(settings, settings.first_name)
    if store.live_version() is not None:
        return
    out.print(describe(publish_items(store, table, datetime.now(UTC))), markup=False)
