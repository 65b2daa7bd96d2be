"""List and inspect published bundles, and move names: promote, roll back, withdraw, set the reference."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from infra.cli.session import audited, if_named, out, user_name
from services.errors import BundleCorrupt, BundleNotFound

if TYPE_CHECKING:
    from models.registry.name_record import Move, NameRecord
    from models.registry.store import BundleStore

RESIDENT_COLUMNS = ("part", "process", "name", "MiB", "loads", "unloaded for room", "idle", "")

bundles_app = typer.Typer(
    help="List, inspect and compare published bundles, and promote, withdraw or roll back versions."
)

Name = Annotated[str, typer.Option(help="The name under which a version serves.")]
Version = Annotated[str, typer.Argument(help="Version of `tailrace bundles`.", show_default=False)]
Force = Annotated[
    bool, typer.Option(help="Also promote a withdrawn version; this removes the record of its withdrawal.")
]


@bundles_app.callback(invoke_without_command=True)
def bundles(context: typer.Context) -> None:
    """List, inspect and compare published bundles, and promote, withdraw or roll back versions."""
    if context.invoked_subcommand is None:
        list_bundles()


@bundles_app.command("list")
def list_bundles(
    name: Name = "default",
    resident: Annotated[bool, typer.Option(help="List the models in memory of this machine's processes.")] = False,
) -> None:
    """List published bundles with their metrics and their role under a name."""
    from rich.table import Column, Table

    if resident:
        _list_resident()
        return
    store, _ = _store(name)
    record, reference = store.record(), store.reference()
    states = _states(record)
    if reference is not None:
        states[reference.version] = ", ".join(filter(None, (states.get(reference.version), "reference")))
    heads = ("decoder\nNDCG@10", "student", "item-kNN")
    narrow = [
        Column("", min_width=len("reference")),
        Column("version", no_wrap=True),
        Column("data set", overflow="fold"),
    ]
    table = Table(*narrow, *heads, box=None, padding=(0, 1, 0, 0), pad_edge=False)
    damaged = []
    for version in dict.fromkeys((*store.versions(), *record.serving)):  # a folder that serves may be missing
        try:
            cells = bundle_row(store.described(version, with_report=True).report())
        except (BundleCorrupt, BundleNotFound) as error:  # the others are still listed
            cells = ["damaged", "-", "-", "-"]
            damaged.append(str(error))
        table.add_row(states.get(version, ""), version, *cells)
    out.print(table if table.row_count else "no bundle yet; `tailrace pipeline` makes one")
    notes = [noted.describe() for noted in (reference, *record.withdrawn.values()) if noted is not None]
    if (canary := record.canary) is not None:
        share = canary.share_at(time.time() * 1_000)
        notes.append(f"{canary.version} is the canary of {name}: {share:.3g} of its users get it, since {canary.at}")
    elsewhere = [_live_as(store.named(other)) for other in store.names() if other != name]
    for message in (*damaged, *notes, *elsewhere):
        out.print(escape(f"note: {message}"))


def _states(record: "NameRecord") -> dict[str, str]:
    """Return the role of each version of a name; a withdrawn version keeps that word unless it is live."""
    states = dict.fromkeys(record.withdrawn, "withdrawn")
    candidate = None if record.canary is None else record.canary.version
    for version, state in ((record.previous, "previous"), (candidate, "canary"), (record.live, "live")):
        if version is not None and (version == record.live or version not in record.withdrawn):
            states[version] = state
    return states


@bundles_app.command()
def show(version: Version) -> None:
    """Print a bundle's manifest and its evaluation report, as JSON."""
    bundle = _store()[0].described(version, with_report=True)
    out.print_json(data={"manifest": bundle.manifest, "report": bundle.report()})


@bundles_app.command()
def history(name: Name = "default") -> None:
    """List the moves of a name, newest last: versions promoted or withdrawn, with time and user."""
    store, _ = _store(name)
    if not (moves := store.record().history):
        raise BundleNotFound(
            f"no version was ever live as {name}; names with a version: {', '.join(store.names()) or 'none'}"
        )
    for move in moves:
        out.print(describe_move(move), markup=False)


@bundles_app.command()
def verify(version: Version) -> None:
    """Hash every file of a bundle and compare it with the manifest."""
    bundle = _store()[0].open(version)
    bundle.verify()
    out.print(f"{version}: {len(bundle.manifest['files'])} files are as they were published", markup=False)


@bundles_app.command()
def withdraw(
    version: Version,
    reason: Annotated[str, typer.Option(help="Reason, kept with the version.")] = "",
    name: Name = "default",
) -> None:
    """Withdraw a version that is not live: promoting it under this name then needs --force."""
    store, state_dir = _store(name)
    with audited(state_dir, "withdraw", version=version, **({"reason": reason} if reason else {}), **if_named(name)):
        store.withdraw(version, by=user_name(), reason=reason)
    out.print(f"{version} is withdrawn", markup=False)


@bundles_app.command()
def gc(
    keep: Annotated[int | None, typer.Option(help="Trainings to keep.", min=1, show_default="keep_bundles")] = None,
) -> None:
    """Remove leftovers of killed processes, and bundles except recent trainings and bundles in use by names."""
    from services.settings.settings import load_settings

    store, state_dir = _store()
    with audited(state_dir, "gc"):
        removed = store.prune(keep or load_settings().keep_bundles)
    out.print(f"removed {', '.join(removed)}" if removed else "nothing to remove", markup=False)


@bundles_app.command()
def diff(
    version: Annotated[str, typer.Argument(help="The first version.", show_default=False)],
    other: Annotated[str, typer.Argument(help="The version that is compared with it.", show_default=False)],
) -> None:
    """Show the differences of two bundles: data, items, quality, options, gate, size and origin."""
    from rich.table import Column, Table

    from models.registry.bundle_diff import compare

    store, _ = _store()
    out.print(f"A  {version}\nB  {other}\n", markup=False)
    width = max(len(version), len(other))  # versions are values too, and must not wrap
    values = [Column(head, overflow="fold", min_width=width) for head in ("A", "B")]
    left = max(12, out.width - 2 * width - len("difference") - 3)
    columns = [Column("", max_width=left), *values, Column("difference", overflow="fold", min_width=len("difference"))]
    table = Table(*columns, box=None, padding=(0, 1, 0, 0), pad_edge=False)
    rows, notes = compare(store.open(version), store.open(other))
    for row in rows:
        table.add_row(*map(escape, row))
    out.print(table)
    for message in notes:
        out.print(escape(f"note: {message}"))


@bundles_app.command()
def reference(version: Version, name: Name = "default") -> None:
    """Make a published bundle the reference: the gate refuses models that are worse by over --max-reference-loss."""
    store, state_dir = _store(name)
    with audited(state_dir, "reference", version=version, **if_named(name)):
        store.set_reference(version, user_name())
    out.print(f"{version} is the reference")


@bundles_app.command()
def promote(version: Version, name: Name = "default", force: Force = False) -> None:
    """Make a published bundle live under a name; the first promotion creates the name."""
    store, state_dir = _store(name)
    with audited(state_dir, "promote", version=version, **if_named(name)):
        store.promote(version, by=user_name(), force=force)
    out.print(f"{version} is live{_as_named(name)}")


@bundles_app.command()
def rollback(
    to: Annotated[
        str | None, typer.Option(help="Version to promote again.", show_default="the previous live version")
    ] = None,
    reason: Annotated[str, typer.Option(help="Reason, kept with the withdrawn version.")] = "",
    name: Name = "default",
    force: Force = False,
) -> None:
    """Promote an earlier bundle, and withdraw the live bundle, whose next promotion needs --force."""
    store, state_dir = _store(name)
    before, release = store.reference(), store.record().canary
    given = {"to": to, "reason": reason, **if_named(name)}
    with audited(state_dir, "rollback", **{key: value for key, value in given.items() if value}):
        withdrawn = store.withdrawals().keys()
        version = store.rollback(to, by=user_name(), reason=reason, force=force)
    left = [withdrawal for withdrawal in store.withdrawals() if withdrawal not in withdrawn]
    out.print(f"{version} is live{_as_named(name)}; {', '.join(left)} {'is' if len(left) == 1 else 'are'} withdrawn")
    if release is not None and store.record().canary is None:
        out.print(f"the release of {release.version} has ended")
    if before is not None and (after := store.reference()) is not None and after.version != before.version:
        out.print(
            f"{before.version} was the reference: now {after.version} is; "
            "`tailrace bundles reference VERSION` sets another"
        )


def describe_move(move: "Move") -> str:
    """Return a move of a name as one line."""
    note = f": {move.note}" if move.note else ""
    return f"{move.at}  {move.act:8}  {move.version or '-'}  by {move.by}{note}"


def bundle_row(report: dict[str, Any]) -> list[str]:
    """Return a bundle's table cells from its evaluation report, a dash for each missing metric."""
    measured = [report.get("metrics", {}).get(model, {}) for model in ("decoder", "student", "item_knn")]
    return [
        str(report.get("dataset") or "-"),
        *("-" if (ndcg := metrics.get("ndcg@10")) is None else f"{ndcg:.4f}" for metrics in measured),
    ]


def _list_resident() -> None:
    """Print which process holds which model, with loads and evictions of this machine since their start."""
    from rich.table import Table

    from services.observability.node_metrics import node_registry
    from services.residency.report import resident_models
    from services.settings.settings import load_settings

    folder = load_settings().metrics_dir
    table = Table(*RESIDENT_COLUMNS, box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for model in resident_models(node_registry(folder).collect()) if folder.exists() else ():
        size = "-" if model.num_bytes is None else f"{model.num_bytes / 2**20:,.1f}"
        counts = map(str, (model.num_loads, model.num_evicted_for_room, model.num_evicted_idle))
        table.add_row(
            model.part, model.process, model.name, size, *counts, "cannot be loaded" if model.has_failed else ""
        )
    out.print(table if table.row_count else "no model is in memory; `tailrace up` starts the stack")


def _live_as(store: "BundleStore") -> str:
    """Return a sentence on the live version under another name, or why it is unknown."""
    try:
        return f"{store.live_version()} is live as {store.name}"
    except BundleCorrupt as error:
        return str(error)


def _as_named(name: str) -> str:
    return "" if name == "default" else f" as {name}"


def _store(name: str = "default") -> "tuple[BundleStore, Path]":
    """Return the store of bundles under a name, and the state folder with the audit file."""
    from models.registry.store import BundleStore
    from services.settings.settings import load_settings

    settings = load_settings()
    return BundleStore.of(settings, name), settings.state_dir.absolute()
