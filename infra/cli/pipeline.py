"""Train and publish offline: `pipeline`, `precompute`, `recommend`, `optimize`, `add-items`."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infra.cli.session import audited, check_output, out, print_line, running_settings
from pipelines.options import OwnTables, PipelineOptions, PrecomputeOptions
from pipelines.tables.options import TableArguments
from pipelines.training.options import RecipeOptions
from services.errors import ConfigError

if TYPE_CHECKING:
    from pipelines.publication.user_lists import ListOptions, ReadHistories
    from services.items.live_items import LiveItems
    from services.settings.settings import Settings


def pipeline(options: PipelineOptions, tables: TableArguments, recipes: RecipeOptions) -> None:
    """Train, evaluate and publish a bundle. Stages whose inputs have not changed are skipped."""
    from infra.local.store import feature_store
    from pipelines.places import Places
    from pipelines.run import run_pipeline
    from pipelines.training.recipes import recipes_of

    settings = running_settings()
    _refuse_deleted(settings, options.model_name)
    options = replace(
        options,
        tables=tables.parsed(),
        recipes=recipes_of(recipes),
        llm_price_ndcg_per_ms=settings.llm_price_ndcg_per_ms,
    )
    overrides = [
        option for option, given in (("--force", options.force), ("--replace-live", options.replace_live)) if given
    ]
    audit = audited(settings.state_dir, " ".join(("pipeline", *overrides))) if overrides else nullcontext()
    with audit:
        _check_tables(options)
        with feature_store(settings, print_line) as settings:
            run_pipeline(options, Places.from_settings(settings), out)


def _check_tables(options: PipelineOptions) -> None:
    """Refuse own tables of the wrong form before a store is started for them. Raises DataError, ConfigError."""
    from pipelines.data.ingest import open_own_tables

    if options.items is not None:
        open_own_tables(options.events, options.items, options.tables)


def _refuse_deleted(settings: "Settings", name: str) -> None:
    """Raise ConfigError for a deleted tenant's name: nobody would delete its outputs and bundles again."""
    from services.contracts.tenant import TenantState, tenant_of_name
    from services.gateway.access.tenants import read_tenants

    if (tenant := tenant_of_name(name)) and settings.tenants_file is not None:
        stored = read_tenants(settings.tenants_file).find(tenant)
        if stored is not None and stored.state is TenantState.DELETED:
            raise ConfigError(f"--name: tenant {tenant} is deleted; train under another tenant's name")


def precompute(
    own: OwnTables,
    tables: TableArguments,
    lists: PrecomputeOptions,
    sources: Annotated[
        bool, typer.Option(help="First count transitions and similar items again, in a child of the live bundle.")
    ] = False,
) -> None:
    """Recompute the stored lists of the live bundle, without training. Run it regularly to keep them fresh."""
    from infra.local.store import feature_store
    from pipelines.places import Places
    from pipelines.refresh import refresh_lists

    settings = running_settings()
    options = PipelineOptions(events=own.events, items=own.items, tables=tables.parsed(), precompute=lists)
    _check_tables(options)
    with feature_store(settings, print_line) as settings:
        refresh_lists(options, Places.from_settings(settings), out, with_sources=sources)


def recommend(
    users: Annotated[Path, typer.Option(help="File with one user ID per line, or a table with a column user_id.")],
    out_file: Annotated[
        Path, typer.Option("--out", help="JSON Lines file with a row per user; appears when it is complete.")
    ],
    k: Annotated[int, typer.Option(help="Items per list.")] = 10,
    category: Annotated[list[str] | None, typer.Option(help="Only items of any of these; repeat it.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Never these items; repeat it.")] = None,
    exclude_file: Annotated[
        Path | None,
        typer.Option(help="Never the items of this file: one ID per line, or a table with a column item_id."),
    ] = None,
    seen: Annotated[
        bool | None, typer.Option(help="Whether lists hold seen items.", show_default="as the bundle learned")
    ] = None,
    histories: Annotated[str, typer.Option(help="Where histories come from: store, or offline tables.")] = "store",
) -> None:
    """Write lists for many users to a file, for example for a mailing. A killed run resumes."""
    from pipelines.publication.user_lists import ListOptions
    from pipelines.tables.id_files import read_ids
    from services.observability.log_lines import configure_logging

    excluded = (*(exclude or ()), *(read_ids(exclude_file, "item_id", "--exclude-file") if exclude_file else ()))
    options = ListOptions(k=k, categories=(*(category or ()),), exclude_item_ids=excluded, with_seen=seen)
    if histories not in ("store", "offline"):
        raise ConfigError(f"--histories: {histories!r} is unknown; give store or offline")
    check_output(users, exclude_file, out=out_file)
    settings = running_settings()
    configure_logging("error", "recommend")  # the unreadable topic is described below
    _write_user_lists(settings, users, out_file, options, is_offline=histories == "offline")


def _write_user_lists(
    settings: "Settings", users: Path, file: Path, options: "ListOptions", *, is_offline: bool
) -> None:
    """Write the lists. An unfinished run resumes with the bundle of its start.

    Raises ConfigError, InvalidRequest for filters with values unknown to the catalogue, BundleNotFound,
    DependencyUnavailable.
    """
    from models.registry.store import BundleStore
    from pipelines.publication.precompute import ranker_of
    from pipelines.publication.user_lists import read_user_ids, started_version, write_lists
    from pipelines.runner.bars import Bars

    num_users = len(read_user_ids(users))
    store, version = BundleStore.of(settings), started_version(file)
    ranker = ranker_of(store.live() if version is None else store.open(version))
    laid = read_items(settings).lay(ranker.catalogue)
    available = laid.columns.available[: laid.num_known]

    def write(read: "ReadHistories") -> int:
        with Bars(out) as bars:
            return write_lists(ranker, available, users, read, options, file, bars.begin("recommend"))

    num_added = _with_histories(settings, write, is_offline=is_offline)
    kept = "" if num_added == num_users else f", {num_users - num_added} of them before this run"
    out.print(f"{file}: lists of {num_users} users by {ranker.bundle_version}{kept}", markup=False)


def read_items(settings: "Settings") -> "LiveItems":
    """Return the live catalogue's items; if the topic cannot be read, those of the snapshot, and print its time.

    Raises EnvironmentFault for a damaged snapshot.
    """
    from services.items.follower import ITEMS_START_S, ItemFollower
    from services.items.live_items import Knowledge, LiveItems
    from services.items.snapshot import read_snapshot

    items, snapshot = LiveItems(), settings.items_snapshot
    follower = ItemFollower(items, settings.kafka_address, settings.items_topic, snapshot)
    follower.start(ITEMS_START_S)
    follower.stop()
    if items.knowledge is not Knowledge.CURRENT:
        is_there = read_snapshot(snapshot, items) is not None
        when = datetime.fromtimestamp(snapshot.stat().st_mtime, UTC) if is_there else None
        hidden = "no item is hidden" if when is None else f"items are hidden as at {when:%Y-%m-%d %H:%M:%S} UTC"
        fix = "start the stack, or set TAILRACE_KAFKA_BOOTSTRAP, for the current states"
        out.print(f"{hidden}: the topic {settings.items_topic} cannot be read; {fix}", markup=False)
    return items


def _with_histories(settings: "Settings", write: "Callable[[ReadHistories], int]", *, is_offline: bool) -> int:
    """Return the result of `write`, called with a reader of the offline table or of the feature store."""
    from infra.local.store import feature_store
    from pipelines.places import Places
    from pipelines.publication.user_lists import table_reader
    from services.features.writer import FeatureWriter
    from services.stream.rebuild import base_table

    if is_offline:
        return write(table_reader(base_table(settings.offline_log_dir)))
    with feature_store(settings, print_line) as running:
        writer = FeatureWriter(Places.from_settings(running).feature_repo)
        num_added = write(writer.read_histories)
        writer.close()
    return num_added


def optimize(
    version: Annotated[str, typer.Argument(help="Version of `tailrace bundles`.", show_default=False)],
    budget: Annotated[
        str, typer.Option(help="Largest loss of the decoder's NDCG@10 that a variant may have.")
    ] = "ndcg=1%",
    recipes: Annotated[
        str, typer.Option(help="Names of recipes, separated by commas.", show_default="all of them")
    ] = "",
    epochs: Annotated[
        int | None, typer.Option(help="Epochs of each recipe's fit.", show_default="the recipe's", min=1)
    ] = None,
    promote: Annotated[bool, typer.Option(help="Promote the best variant if VERSION is live.")] = False,
) -> None:
    """Make smaller and faster variants of a bundle's decoder, measure them as served, and publish the winners."""
    import shlex

    import torch

    from pipelines.optimize.choice import parse_budget
    from pipelines.optimize.optimize import OptimizeOptions
    from pipelines.optimize.optimize import optimize as run_optimize
    from pipelines.optimize.recipes import chosen
    from pipelines.places import Places

    settings = running_settings()
    torch.set_num_threads(settings.llm_threads)
    options = OptimizeOptions(
        recipes=chosen(recipes),
        budget=parse_budget(budget),
        dtype=getattr(torch, settings.llm_dtype),
        promotes=promote,
        epochs=epochs,
        command=shlex.join(["tailrace", *sys.argv[1:]]),
    )
    with audited(settings.state_dir, "optimize", version=version):
        run_optimize(version, options, Places.from_settings(settings), out)


def add_items(
    tables: TableArguments,
    items: Annotated[
        Path | None,
        typer.Argument(
            help="Items, as for `tailrace pipeline`; items of the bundle stay unchanged.",
            show_default="new items of the live catalogue",
        ),
    ] = None,
    index: Annotated[
        Path | None, typer.Option(help="SIDs of the new items, for a bundle whose codes came from an index.")
    ] = None,
    lift: Annotated[
        float, typer.Option(help="Factor on the rows of new items; above 1 raises them in lists of all items.")
    ] = 1.0,
    force: Annotated[bool, typer.Option(help="Publish although the same bundle was withdrawn.")] = False,
) -> None:
    """Make new items recommendable at once: add them to the live bundle, by codes or texts, without training."""
    from datetime import UTC, datetime

    from models.registry.store import BundleStore
    from pipelines.publication.add_items import append_items
    from pipelines.publication.new_items import add_new_items, read_live_items
    from pipelines.tables.columns import check_used
    from pipelines.tables.reader import ItemTable, open_table

    settings = running_settings()
    store = BundleStore.of(settings)
    with audited(settings.state_dir, "add-items"):
        if items is None:
            if not add_new_items(store, read_live_items(settings), print_line, settings.keep_bundles):
                print_line("the live catalogue has no new items with a title")
            return
        options = tables.parsed("items")
        table = ItemTable(open_table(items, "items", options), options)
        check_used(options, [("items", table.table, table.named)])
        bundle, num_new = append_items(store, table, datetime.now(UTC), lift, print_line, force=force, index=index)
    print_line(f"{num_new} new items; {bundle.version} is live")
