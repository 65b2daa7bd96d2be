"""The benchmarks as commands of `tailrace`: any of them by name (`bench`), faults (`chaos`), and machines for a load (`plan`)."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from services.errors import NotFound

PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Of a command whose options are those of the benchmark behind it, `--help` among them."""
BENCHMARKS = {
    "serve": "how fast the running stack answers, by tier and door; `serve overload`, `serve load`",
    "freshness": "how soon an event shows in an answer of the running stack",
    "capacity": "what a request, a user and an event of the running stack cost; `tailrace plan` computes from it",
    "text": "what the OpenAI door costs beside the bare engine",
    "faults": "what callers see while one part after another fails, on a stack of its own",
    "soak": "whether every promise holds for a long time under faults, on a stack of its own",
    "engine": "the engine beside transformers and vLLM; `engine curves`, `engine validity`, `engine kv-kinds`",
    "quality": "how well decoder, student and baselines rank; `quality cold-items`, `quality warm-start`",
    "variants": "what quantised and pruned variants of a decoder gain and lose beside the engine's int8",
    "pipeline": "what each offline stage takes as the data grows",
    "scale": "how the cost of serving grows with size",
    "gpu": "everything that a graphics card must show",
}
"""By name, the question that it answers."""


def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Which one; without it all are listed.", show_default=False)] = "",
) -> None:
    """Run a benchmark, with its own options, on the ports of the stack that runs from these settings."""
    if name in {"", "--help"}:
        for one, question in BENCHMARKS.items():
            typer.echo(f"{one:10} {question}")
        typer.echo("tailrace bench NAME --help lists the options of one")
    elif name in BENCHMARKS:
        _run(name, context.args)
    else:
        raise NotFound(f"there is no benchmark {name}", f"the benchmarks are {', '.join(BENCHMARKS)}")


def chaos(context: typer.Context) -> None:
    """Inject faults into a separate stack and report what callers see: `tailrace bench faults`, into faults.json unless --json names a file."""
    words = context.args
    _run("faults", words if {"--json", "--help"} & {*words} else ["--json", "faults.json", *words])


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


def _run(name: str, arguments: list[str]) -> None:
    """Run a benchmark with these settings. Exits with its code when it fails."""
    from infra.local.supervisor.ports import of_running_stack
    from services.settings.settings import inherited_environment, load_settings

    settings = of_running_stack(load_settings())
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *arguments],
        env={**inherited_environment(), **settings.as_environment()},
        check=False,
    )
    if done.returncode:
        raise typer.Exit(done.returncode)
