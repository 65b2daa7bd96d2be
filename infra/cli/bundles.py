"""List published bundles, compare two, set the reference, and move the live pointer: promote one, or roll back to one."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from infra.cli.audit import audited, user_name
from services.errors import BundleCorrupt, BundleNotFound

if TYPE_CHECKING:
    from models.registry import BundleStore

bundles_app = typer.Typer(help="List published bundles and their metrics, or compare two.")
out = Console(highlight=False, soft_wrap=True)

Force = Annotated[bool, typer.Option(help="Also a version that was withdrawn; its record is then removed.")]


@bundles_app.callback(invoke_without_command=True)
def bundles(context: typer.Context) -> None:
    """List published bundles and their metrics, or compare two."""
    if context.invoked_subcommand is None:
        _list(_store()[0])


def _list(store: "BundleStore") -> None:
    from rich.table import Column, Table

    withdrawals, live = store.withdrawals(), store.live_version()
    states = dict.fromkeys(withdrawals, "withdrawn")
    for pointed, state in ((store.previous_version(), "previous"), (live, "live")):
        if pointed is not None and (pointed == live or pointed not in withdrawals):
            states[pointed] = state
    reference = store.reference()
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
    for version in store.versions():
        try:
            cells = bundle_row(store.open(version).report())
        except (BundleCorrupt, BundleNotFound) as error:  # the others are still listed
            cells = ["damaged", "-", "-", "-"]
            damaged.append(str(error))
        table.add_row(states.get(version, ""), version, *cells)
    out.print(table if table.row_count else "no bundle yet; `tailrace pipeline` makes one")
    notes = [one.describe() for one in (reference, *withdrawals.values()) if one is not None]
    for message in (*damaged, *notes):
        out.print(escape(f"note: {message}"))


@bundles_app.command()
def diff(
    version: Annotated[str, typer.Argument(help="The version to compare with.", show_default=False)],
    other: Annotated[str, typer.Argument(help="The version whose difference to it is shown.", show_default=False)],
) -> None:
    """Show in what two bundles differ: data, items, quality, options, gate, size and origin."""
    from rich.table import Column, Table

    from infra.cli.bundle_diff import compare

    store, _ = _store()
    out.print(f"A  {version}\nB  {other}\n", markup=False)
    width = max(len(version), len(other))  # versions are values too, and are not broken
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
def reference(
    version: Annotated[str, typer.Argument(help="Version of `tailrace bundles`.", show_default=False)],
) -> None:
    """Make a published bundle the reference: the gate refuses models that are worse than it by more than --max-reference-loss."""
    store, state_dir = _store()
    with audited(state_dir, "reference", version=version):
        store.set_reference(version, user_name())
    out.print(f"{version} is the reference")


def promote(
    version: Annotated[str, typer.Argument(help="Version of `tailrace bundles`.", show_default=False)],
    force: Force = False,
) -> None:
    """Make a published bundle live."""
    store, state_dir = _store()
    with audited(state_dir, "promote", version=version):
        store.promote(version, force=force)
    out.print(f"{version} is live")


def rollback(
    to: Annotated[
        str | None, typer.Option(help="Version to go back to.", show_default="the one that was live before")
    ] = None,
    reason: Annotated[str, typer.Option(help="Why; kept with the version that is withdrawn.")] = "",
    force: Force = False,
) -> None:
    """Make an earlier bundle live again, and withdraw the one that was live: without --force it does not come back."""
    store, state_dir = _store()
    before = store.reference()
    with audited(state_dir, "rollback", **({"to": to} if to else {}), **({"reason": reason} if reason else {})):
        version = store.rollback(to, by=user_name(), reason=reason, force=force)
    out.print(f"{version} is live; {store.previous_version()} is withdrawn")
    if before is not None and (after := store.reference()) is not None and after.version != before.version:
        out.print(
            f"{before.version} was the reference: now {after.version} is; `tailrace bundles reference VERSION` sets another"
        )


def bundle_row(report: dict[str, Any]) -> list[str]:
    """Return a bundle's table cells from its evaluation report, a dash for what was not measured."""
    measured = [report.get("metrics", {}).get(model, {}) for model in ("decoder", "student", "item_knn")]
    return [str(report.get("dataset", "-")), *(f"{one['ndcg@10']:.4f}" if one else "-" for one in measured)]


def _store() -> "tuple[BundleStore, Path]":
    """Return the store of bundles and the state folder, which has the audit file."""
    from models.registry import BundleStore
    from services.settings.settings import load_settings

    settings = load_settings()
    return BundleStore(settings.bundle_root.absolute()), settings.state_dir.absolute()
