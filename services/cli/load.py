"""`tailrace bench` and `tailrace chaos`: load on a running stack, and faults on one of its own. Runs `benchmarks` in processes of their own."""

import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.load.profiles import Profile

bench_app = typer.Typer(
    help="Measure the running stack: load per tier and door, then freshness. `bench load` sends one shape of load."
)


class DoorName(StrEnum):
    """Through which door."""

    REST = "rest"
    GRPC = "grpc"
    BOTH = "both"


@bench_app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    out_dir: Annotated[Path, typer.Option(help="Where the JSON files go.")] = Path("benchmarks/results"),
) -> None:
    """Measure load per tier and door, then freshness, unless a subcommand says otherwise."""
    if context.invoked_subcommand is None:
        out_dir.mkdir(parents=True, exist_ok=True)
        for name in ("serve", "freshness"):
            _run(name, "--json", str(out_dir / f"{name}.json"))


@bench_app.command()
def load(
    profile: Annotated[Profile, typer.Option(help="The shape.")] = Profile.STEADY,
    rate: Annotated[float, typer.Option(min=0.1, max=1_000, help="Requests a second on average.")] = 50.0,
    duration: Annotated[float, typer.Option(min=1, max=3_600, help="Seconds.")] = 30.0,
    door: Annotated[DoorName, typer.Option(help="Through which door.")] = DoorName.BOTH,
    deadline_ms: Annotated[int, typer.Option(min=1, help="What every request asks for.")] = 200,
    key_file: Annotated[Path | None, typer.Option(help="A file with the API key to use.")] = None,
    low_key_file: Annotated[Path | None, typer.Option(help="A file with the key of the spike's callers.")] = None,
    json: Annotated[Path | None, typer.Option(help="Where the report goes.")] = None,
) -> None:
    """Send one shape of load, open loop, with a live view: rate, tiers, latencies, deadlines."""
    options = {"--profile": profile, "--rate": rate, "--duration": duration, "--door": door}
    given = {"--deadline-ms": deadline_ms, "--key-file": key_file, "--low-key-file": low_key_file, "--json": json}
    words = {**options, **{name: value for name, value in given.items() if value is not None}}
    _run("profile_load", *(str(word) for pair in words.items() for word in pair))


def chaos(
    fault: Annotated[list[str] | None, typer.Option(help="Only this one; may be repeated. Default: all.")] = None,
    rate: Annotated[float, typer.Option(min=1, max=200, help="Requests a second.")] = 50.0,
    json: Annotated[Path, typer.Option(help="Where the report goes.")] = Path("faults.json"),
    logs: Annotated[Path | None, typer.Option(help="Where the stack's logs are kept.")] = None,
) -> None:
    """Break one thing after another on a stack of its own, and show what callers see. A running stack is not touched."""
    only = ["--fault", *fault] if fault else []
    kept = [] if logs is None else ["--logs", str(logs)]
    _run("faults", "--json", str(json), "--rate", str(rate), *only, *kept)


def _run(module: str, *arguments: str) -> None:
    """Run a benchmark on these settings; ends with its code when it fails."""
    from services.settings.settings import inherited_environment, load_settings

    settings = load_settings()
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *arguments],
        env={**inherited_environment(), **settings.as_environment()},
        check=False,
    )
    if done.returncode:
        raise typer.Exit(done.returncode)
