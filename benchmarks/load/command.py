"""Argument types of the benchmarks' commands, and their results files.

Standard library only: the engine benchmark also runs where no other package is installed.
"""

import argparse
import json
import math
import os
import platform
import sys
import time
from asyncio import CancelledError
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from pipelines.declaration import Option, parser_of


def above_zero(text: str) -> float:
    """Read a rate or a time. Raises ArgumentTypeError."""
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def at_least_one(text: str) -> int:
    """Read a count. Raises ArgumentTypeError."""
    value = _number(text)
    if not value.is_integer() or value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(value)


def host_and_port(text: str) -> tuple[str, int]:
    """Read HOST:PORT, optionally after `http://`. Raises ArgumentTypeError."""
    host, _, port = text.removeprefix("http://").removesuffix("/").rpartition(":")
    if not host or not port.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT; give such as localhost:8000")
    return host, int(port)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """The options of a benchmark that writes one results file; a benchmark's own options extend it."""

    json: Annotated[Path, Option("Results file to write.")]


def report_parser(description: str, kind: type[ReportOptions] = ReportOptions) -> argparse.ArgumentParser:
    """Return the parser of a benchmark that writes one results file, with the options of `kind`."""
    return parser_of(kind, description)


def run_named(modules: Mapping[str, str], default: Callable[[], None]) -> None:
    """Run the module that the first argument names, passing the remaining arguments; by default, the default module."""
    if (name := "".join(sys.argv[1:2])) in modules:
        del sys.argv[1]
        import_module(modules[name]).main()
    else:
        default()


@contextmanager
def exit_on_errors() -> Iterator[None]:
    """End the program with a line for an error that names its fix, or for SIGTERM."""
    from services.errors import TailraceError  # not at the top: see above

    try:
        yield
    except TailraceError as error:
        sys.exit(f"error: {error}")
    except CancelledError:
        sys.exit("stopped")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def command_of(name: str) -> str:
    """Return the command line that started the benchmark of this name."""
    return f"python -m benchmarks.{name} {' '.join(sys.argv[1:])}"


def about_run(name: str) -> dict[str, Any]:
    """Return the header of a results file: benchmark, command, time, machine."""
    return {
        "benchmark": name,
        "command": command_of(name),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {
            "cpus": os.cpu_count(),
            "arch": platform.machine(),
            "model": processor(),
            "python": platform.python_version(),
        },
    }


def processor() -> str:
    """Return the processor's name; empty if the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def newest_tokens(state_dir: Path) -> Path:
    """Return the newest output of stage `tokenize`, with training and test cases. Exits with the fix if missing."""
    stages = state_dir / "pipeline" / "tokenize"
    if not (paths := list(stages.glob("*/"))):
        sys.exit(f"error: {stages} is empty, so there are no cases; run `tailrace pipeline` there")
    return max(paths, key=lambda path: path.stat().st_mtime)


def rows_on_file(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a results file, [] without the file."""
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []
    return rows


def write_report(path: Path, report: object) -> None:
    """Write a results file; create its folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
