"""The benchmarks as commands: `bench NAME`, and `chaos`, which injects faults."""

import subprocess
import sys
from typing import Annotated

import typer

from services.errors import NotFound

PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""For commands that pass their options, including `--help`, to the benchmark behind them."""
BENCHMARKS = {
    "serve": "latency of the running stack by tier and door; `serve overload` exceeds its capacity, "
    "`serve lists` compares batches, similar and popular items",
    "freshness": "time until an event changes an answer of the running stack; `freshness erasures`, `freshness hides`",
    "rules": "cost of filters and rules per request",
    "wishes": "time to read wishes, with faults of the reader and fuzzed wishes",
    "text": "overhead of the OpenAI door over the bare engine",
    "release": "time until a worse release is rolled back, and its losses, on a separate stack; `release simulated`",
    "faults": "answers that callers see while each part fails in turn, on a separate stack",
    "soak": "whether every promise holds for a long time under faults, on a separate stack",
    "engine": "the engine against transformers and vLLM; `engine curves`, `engine validity`",
    "foreign": "lists of an imported recommender against its framework's own decoding",
    "quality": "ranking quality of decoder, student and baselines; `quality warm-start`, `cold-items`, `linear-state`",
    "pipeline": "time of each offline stage as the data grows",
    "plan": "error of predicted training speeds against published runs; `plan capacity` measures the running stack",
    "scale": "growth of the serving cost with size; `scale item-states`",
    "train": "whether workers in any layout learn the same as one process, also after a crash",
    "gpu": "all checks that need a graphics card",
}
"""Each benchmark's measurement, by name."""


def bench(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(help="Name of a benchmark; without a name all are listed.", show_default=False)
    ] = "",
) -> None:
    """Run a benchmark, with its own options, on the ports of the stack that runs from these settings."""
    if name in {"", "--help"}:
        for known, measured in BENCHMARKS.items():
            typer.echo(f"{known:10} {measured}")
        typer.echo("tailrace bench NAME --help lists the options of a benchmark")
    elif name in BENCHMARKS:
        _run(name, context.args)
    else:
        raise NotFound(f"unknown benchmark {name}", f"the benchmarks are {', '.join(BENCHMARKS)}")


def chaos(context: typer.Context) -> None:
    """Inject faults into a separate stack and report what callers see.

    This is `tailrace bench faults`; it writes faults.json unless --json names a file.
    """
    words = context.args
    _run("faults", words if {"--json", "--help"} & {*words} else ["--json", "faults.json", *words])


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
