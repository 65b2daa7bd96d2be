"""A benchmark's own stack ends with the benchmark."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from infra.local.commands.down import stop_stack
from infra.local.supervisor.stackfile import StackFile
from services.settings.settings import Settings
from tests.support.pages import ROOT
from tests.support.wait import wait_for

_BENCHMARK = """
import os, pathlib, signal, sys
from benchmarks.load.own_stack import stack_for
from infra.local.commands import up
from services.settings.settings import Settings

def spawn(*arguments, spawn_stack=up.spawn_stack):
    child = spawn_stack(*arguments)
    for number in sys.argv[2:]:
        os.kill(os.getpid(), int(number))
    return child

up.spawn_stack = spawn
with stack_for(Settings(state_dir=pathlib.Path(sys.argv[1])), is_started=True):
    pass
"""


@pytest.mark.parametrize("early", [(), (signal.SIGTERM,), (signal.SIGINT,)])
def test_a_signal_stops_a_benchmark_and_its_stack(tmp_path: Path, early: tuple[signal.Signals, ...]) -> None:
    """A stack that is left would disturb the next benchmark. `early` arrives while the stack is spawned."""
    command = [sys.executable, "-c", _BENCHMARK, str(tmp_path), *(str(int(number)) for number in early)]
    try:
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as benchmark:
            stack_file = StackFile(tmp_path)
            wait_for(lambda: stack_file.read() is not None, 60.0, "the stack's record")
            if not early:
                benchmark.send_signal(signal.SIGTERM)
            _, errors = benchmark.communicate(timeout=60.0)
        is_left = stack_file.is_claimed()
    finally:
        stop_stack(Settings(state_dir=tmp_path))

    assert (benchmark.returncode, errors.splitlines()[-1:], is_left) == (1, ["stopped"], False)
