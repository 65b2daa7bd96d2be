"""A benchmark's results file: what each says of its run, and how it is written. Standard library alone."""

import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any


def command_of(name: str) -> str:
    """Return the command by which the benchmark of this name was begun."""
    return f"python -m benchmarks.{name} {' '.join(sys.argv[1:])}"


def about_run(name: str) -> dict[str, Any]:
    """Say which benchmark this is, by which command, when, and on what."""
    return {
        "benchmark": name,
        "command": command_of(name),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {"cpus": os.cpu_count(), "arch": platform.machine(), "python": platform.python_version()},
    }


def write_report(path: Path, report: object) -> None:
    """Write the file, in a folder that is made if absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
