"""The benchmarks as commands of `tailrace`: by name (`bench`), and faults (`chaos`)."""

import subprocess
import sys
from typing import Annotated

import typer

from services.errors import NotFound

PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""For commands that pass their options, including `--help`, to the benchmark behind them."""
BENCHMARKS = {
    "serve": "how fast the running stack answers, by tier and door; `serve overload` goes beyond its capacity, `serve lists` compares batches, similar and popular items",
    "freshness": "how soon an event shows in an answer of the running stack; `freshness erasures`, `freshness hides`",
    "rules": "what filters and rules cost a request",
    "text": "what the OpenAI door costs beside the bare engine",
    "release": "how soon a worse release is rolled back, and what is lost meanwhile, on a stack of its own; `release simulated`",
    "faults": "what callers see while one part after another fails, on a stack of its own",
    "soak": "whether every promise holds for a long time under faults, on a stack of its own",
    "engine": "the engine beside transformers and vLLM; `engine curves`, `engine validity`",
    "quality": "how well decoder, student and baselines rank; `quality warm-start`",
    "pipeline": "what each offline stage takes as the data grows",
    "plan": "how far predictions of training speed are from published runs; `plan capacity` measures the running stack",
    "scale": "how the cost of serving grows with size; `scale item-states`",
    "train": "whether workers in any layout learn what one process does, and what a killed one changes",
    "gpu": "everything that a graphics card must show",
}
"""The question that a benchmark answers, by name."""


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
