"""A benchmark's own stack ends with the benchmark."""

import signal
import subprocess
import sys
from pathlib import Path

from infra.local.supervisor.stackfile import StackFile
from tests.support.pages import ROOT
from tests.support.wait import wait_for

_BENCHMARK = """
import pathlib, sys
from benchmarks.load.own_stack import stack_for
from services.settings.settings import Settings

with stack_for(Settings(state_dir=pathlib.Path(sys.argv[1])), is_started=True):
    pass
"""


def test_sigterm_stops_a_benchmark_and_its_stack(tmp_path: Path) -> None:
    """Without its stack, the next benchmark measures an idle machine."""
    command = [sys.executable, "-c", _BENCHMARK, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as benchmark:
        stack_file = StackFile(tmp_path)
        wait_for(lambda: stack_file.read() is not None, 60.0, "the stack's record")
        benchmark.send_signal(signal.SIGTERM)
        _, errors = benchmark.communicate(timeout=60.0)

    assert (benchmark.returncode, errors.splitlines()[-1:], stack_file.is_claimed()) == (1, ["stopped"], False)
