"""One point of a benchmark, measured in a separate process within a time limit."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

_STOP_S = 60.0


def run_point(
    name: str, command: Sequence[str], limit_s: float, environment: Mapping[str, str]
) -> dict[str, Any] | None:
    """Run a point, with all processes that it starts, and return the JSON of its last line.

    Returns None, with a line on stderr that begins with `name`, if it failed or took longer.
    """
    point = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    try:
        printed, _ = point.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        sys.stderr.write(f"{name}: not measured within {limit_s:g} s\n")
        return None
    finally:
        _end(point)
    if point.returncode:
        sys.stderr.write(f"{name}: not measured, its process ended with {point.returncode}\n")
        return None
    row: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return row


def _end(point: "subprocess.Popen[str]") -> None:
    """Let a running point stop its servers; kill its process group if it does not."""
    if point.poll() is None:
        point.send_signal(signal.SIGINT)
        try:
            point.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(point.pid, signal.SIGKILL)
            point.wait()
