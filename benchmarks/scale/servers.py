"""The real servers of an axis, each a process on its own port: the stack's Valkey and broker, and stream workers."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

from infra.local.parts import broker_part, valkey_part
from infra.local.supervisor.part import Part
from infra.local.supervisor.ports import free_window
from services.settings.settings import Settings, inherited_environment

_START_S = 60.0


def settings_in(folder: Path, **values: Any) -> Settings:
    """Return the settings of servers that keep all data in this folder."""
    first = free_window(8, seed=str(folder))
    return Settings(state_dir=folder, redis_port=first, kafka_bootstrap=f"127.0.0.1:{first + 1}", **values)


def wait_until(is_so: Callable[[], bool], limit_s: float, what: str) -> float:
    """Wait for a condition, and return the seconds that it took. Exits on timeout."""
    began_s = time.monotonic()
    while not is_so():
        if time.monotonic() - began_s > limit_s:
            sys.exit(f"error: {what} within {limit_s:g} s")
        time.sleep(0.005)
    return time.monotonic() - began_s


@contextmanager
def valkey(settings: Settings) -> Iterator[int]:
    """Run the store until the block ends; yield its process id."""
    (settings.state_dir / "valkey").mkdir(parents=True, exist_ok=True)
    with _part(valkey_part(settings)) as pid:
        yield pid


@contextmanager
def broker(settings: Settings) -> Iterator[int]:
    """Run the broker until the block ends; yield its process id."""
    with _part(broker_part(settings)) as pid:
        yield pid


@contextmanager
def workers(settings: Settings, num_workers: int, notes: Path) -> Iterator[list[int]]:
    """Run the stream workers until the block ends, each with its notes below this folder; yield their process ids."""
    with ExitStack() as running:
        pids = []
        for index in range(num_workers):
            own = settings.model_copy(update={"worker_index": index, "num_workers": num_workers})
            command = [sys.executable, "-m", "benchmarks.scale.timed_worker", str(notes / f"{index}.npy")]
            environment = {**inherited_environment(), "OMP_NUM_THREADS": "1", **own.as_environment()}
            pids.append(running.enter_context(_process(command, environment, sys.stderr)))
        yield pids


@contextmanager
def _part(part: Part) -> Iterator[int]:
    with _process(part.command, inherited_environment() | part.environment, subprocess.DEVNULL) as pid:
        wait_until(part.is_healthy, _START_S, f"{part.name} was not ready")
        yield pid


@contextmanager
def _process(command: Sequence[str], environment: dict[str, str], output: TextIO | int) -> Iterator[int]:
    """Run a process; end it with SIGTERM."""
    process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        yield process.pid
    finally:
        process.terminate()
        process.wait()
