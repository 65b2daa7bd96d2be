"""What `benchmarks` measures: load on a running stack (`bench`), faults on a separate one (`chaos`), and machines for a load (`plan`)."""

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
    from benchmarks.faults.kinds import FAULTS

    if unknown := next((name for name in fault or () if name not in FAULTS), None):
        raise typer.BadParameter(f"there is no fault {unknown}; the faults are {', '.join(FAULTS)}")
    only = ["--fault", *fault] if fault else []
    kept = [] if logs is None else ["--logs", str(logs)]
    _run("faults", "--json", str(json), "--rate", str(rate), *only, *kept)


def plan(
    rate: Annotated[float, typer.Option(help="Requests per second at peak.")],
    users: Annotated[int, typer.Option(help="Users in the feature store.")],
    items: Annotated[int, typer.Option(help="Items in the catalogue.")],
    events_rate: Annotated[
        float | None, typer.Option(help="Events per second.", show_default="a tenth of --rate")
    ] = None,
    mix: Annotated[
        str, typer.Option(help="Share of requests per tier.")
    ] = "precomputed=0.5,llm=0.2,student=0.25,popular=0.05",
    kv_users: Annotated[int, typer.Option(help="Users whose context stays in the KV cache.")] = 300,
    basis: Annotated[Path | None, typer.Option(help="Results file of benchmarks.capacity.")] = None,
) -> None:
    """Estimate cores, replicas and memory for a load, from measured costs."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from benchmarks.capacity.plan import Demand, parse_mix, read_basis
    from benchmarks.capacity.plan import plan as make_plan

    demand = Demand(
        rate=rate,
        users=users,
        items=items,
        events_rate=rate / 10 if events_rate is None else events_rate,
        mix=parse_mix(mix),
        kv_users=kv_users,
    )
    out = Console(highlight=False, soft_wrap=True)
    made = make_plan(demand, read_basis(basis))
    table = Table("part", "busy cores", "replicas", "memory", box=None)
    for line in made.lines:
        table.add_row(line.part, f"{line.cores:.2f}", str(line.replicas), f"{line.memory_mb:,.0f} MB")
    out.print(table)
    out.print(f"provide   {made.cores:.1f} cores and {made.memory_gb:.1f} GB for the processes")
    out.print(f"KV cache  TAILRACE_KV_NUM_BLOCKS={made.kv_num_blocks} keeps the whole context of {kv_users} users")
    out.print(f"log       {made.log_gb_per_day:.2f} GB of events a day")
    for note in made.notes:
        out.print(escape(f"note: {note}"))


def _run(module: str, *arguments: str) -> None:
    """Run a benchmark with these settings. Exits with its code when it fails."""
    from infra.local.supervisor.ports import of_running_stack
    from services.settings.settings import inherited_environment, load_settings

    settings = of_running_stack(load_settings())
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *arguments],
        env={**inherited_environment(), **settings.as_environment()},
        check=False,
    )
    if done.returncode:
        raise typer.Exit(done.returncode)
