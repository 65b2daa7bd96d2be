"""`tailrace bench` and `tailrace chaos`: load on a running stack, faults on a separate one. Each runs a module of `benchmarks`."""

import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.load.profiles import Profile

bench_app = typer.Typer(
    help="Measure the running stack: load per tier and door, then freshness. `bench load` sends one load profile."
)


class DoorName(StrEnum):
    """The door to call."""

    REST = "rest"
    GRPC = "grpc"
    BOTH = "both"


@bench_app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    out_dir: Annotated[Path, typer.Option(help="Folder for the JSON results.")] = Path("benchmarks/results"),
) -> None:
    """Measure load per tier and door, then freshness."""
    if context.invoked_subcommand is None:
        out_dir.mkdir(parents=True, exist_ok=True)
        for name in ("serve", "freshness"):
            _run(name, "--json", str(out_dir / f"{name}.json"))


@bench_app.command()
def load(
    profile: Annotated[Profile, typer.Option(help="Load profile.")] = Profile.STEADY,
    rate: Annotated[float, typer.Option(min=0.1, max=1_000, help="Average requests per second.")] = 50.0,
    duration: Annotated[float, typer.Option(min=1, max=3_600, help="Duration in seconds.")] = 30.0,
    door: Annotated[DoorName, typer.Option(help="Door to call.")] = DoorName.BOTH,
    deadline_ms: Annotated[int, typer.Option(min=1, help="Deadline of each request in milliseconds.")] = 200,
    key_file: Annotated[Path | None, typer.Option(help="File with the API key.")] = None,
    low_key_file: Annotated[Path | None, typer.Option(help="File with the API key of the spike's callers.")] = None,
    json: Annotated[Path | None, typer.Option(help="File for the JSON report.")] = None,
) -> None:
    """Send load to the running stack, open loop, with a live view of rate, tiers, latencies and deadlines."""
    options = {"--profile": profile, "--rate": rate, "--duration": duration, "--door": door}
    given = {"--deadline-ms": deadline_ms, "--key-file": key_file, "--low-key-file": low_key_file, "--json": json}
    words = {**options, **{name: value for name, value in given.items() if value is not None}}
    _run("profile_load", *(str(word) for pair in words.items() for word in pair))


def chaos(
    fault: Annotated[list[str] | None, typer.Option(help="Run only this fault; repeat for more. Default: all.")] = None,
    rate: Annotated[float, typer.Option(min=1, max=200, help="Requests per second.")] = 50.0,
    json: Annotated[Path, typer.Option(help="File for the JSON report.")] = Path("faults.json"),
    logs: Annotated[Path | None, typer.Option(help="Folder for the logs of the separate stack.")] = None,
) -> None:
    """Inject faults into a separate stack, one after another, and report what callers see. A running stack is not touched."""
    only = ["--fault", *fault] if fault else []
    kept = [] if logs is None else ["--logs", str(logs)]
    _run("faults", "--json", str(json), "--rate", str(rate), *only, *kept)


def _run(module: str, *arguments: str) -> None:
    """Run a benchmark with these settings. Exits with its code when it fails."""
    from services.settings.settings import inherited_environment, load_settings

    settings = load_settings()
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *arguments],
        env={**inherited_environment(), **settings.as_environment()},
        check=False,
    )
    if done.returncode:
        raise typer.Exit(done.returncode)
