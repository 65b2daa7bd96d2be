"""An engine's process: its start (interpreter, module, environment), requests and end."""

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_LOAD_S = 900.0
_ANSWER_S = 900.0
_LOG_LINES = 30


class EngineFailed(Exception):
    """The process ended, hung, or failed at a request."""


class EngineProcess:
    """A process that runs one of the engine modules."""

    def __init__(self, entry: "Entry", answer_s: float = _ANSWER_S) -> None:
        self._answer_s = answer_s
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        settings = [f"{name}={value}" for name, value in entry.variables.items()]
        self._process = subprocess.Popen(
            ["/usr/bin/env", *settings, entry.python, "-m", entry.module, json.dumps(entry.options)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        self.described: dict[str, Any] = {}

    def wait_until_ready(self) -> None:
        """Wait for the engine to be loaded. Raises EngineFailed."""
        self.described = self._read(_LOAD_S)

    def ask(self, ask: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and wait for the reply. Raises EngineFailed after printing the end of the process log.

        A process that does not answer in time is killed: otherwise its late reply would count as the next request's.
        """
        assert self._process.stdin is not None, "opened with a pipe"
        try:
            self._process.stdin.write(json.dumps(ask).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise EngineFailed(self._failure()) from error
        reply = self._read(self._answer_s)
        if "error" in reply:
            print(self._log_end(), file=sys.stderr)
            raise EngineFailed(reply["error"].splitlines()[0])
        return reply

    def stop(self) -> None:
        """End the process and wait for it."""
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def _read(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None, "opened with a pipe"
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            self._process.kill()
            raise EngineFailed(f"no answer in {timeout_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise EngineFailed(self._failure())
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _failure(self) -> str:
        self._process.wait()
        return self._log_end() or f"ended with {self._process.returncode}"

    def _log_end(self) -> str:
        self._log.seek(0)
        return "".join(self._log.readlines()[-_LOG_LINES:])


_PEERS_HOME = ROOT / ".bench"
"""Where `make bench-peers` installs vLLM and llama.cpp, each in its own environment."""
VLLM_HOME = _PEERS_HOME / "vllm"
_DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True)
class Entry:
    """The command of one engine's process: interpreter, module with options, and environment variables."""

    python: Path
    module: str
    options: dict[str, Any]
    variables: dict[str, str]


def our_entry(model: str, device: str, threads: int, config: dict[str, Any]) -> Entry:
    """Return the entry of our engine with this configuration."""
    options = {"model": model, "device": device, "threads": threads, "dtype": _DTYPE, "config": config}
    return Entry(Path(sys.executable), "benchmarks.engine.tailrace", options, _threads(threads))


def peer_entry(name: str, model: str, device: str, threads: int) -> Entry | None:
    """Return the entry of a peer, or None if it is not installed."""
    options = {"model": model, "device": device, "threads": threads, "dtype": _DTYPE}
    if name == "transformers":
        if find_spec("transformers") is None:
            return None
        return Entry(Path(sys.executable), "benchmarks.engine.transformers", options, _threads(threads))
    python = _PEERS_HOME / name / "bin/python"
    if not python.exists():
        return None
    variables = _threads(threads) | (_vllm_variables(device, threads) if name == "vllm" else {})
    return Entry(python, f"benchmarks.engine.{name}", options, variables)


def reference_entry(model: str, threads: int) -> Entry:
    """Return the entry of the fp32 reference."""
    options = {"model": model, "threads": threads, "is_reference": True}
    return Entry(Path(sys.executable), "benchmarks.engine.transformers", options, _threads(threads))


def _threads(threads: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def _vllm_variables(device: str, threads: int) -> dict[str, str]:
    """Run the engine in one process, keep its compiled code in .bench, and on a CPU bind it to the same cores."""
    own = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(_PEERS_HOME / "vllm-cache"),
    }
    if device != "cpu":
        return own
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return own | {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
    }
