"""How each engine's process is started: which interpreter, which module, which environment. Peers may not be installed."""

import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.engine.process import ROOT

VLLM_HOME = ROOT / ".bench/vllm"
"""Where `make bench-peers` installs vLLM."""
_DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True)
class Entry:
    """One engine's process to be."""

    python: Path
    module: str
    options: dict[str, Any]
    variables: dict[str, str]


def our_entry(model: str, device: str, threads: int, config: dict[str, Any]) -> Entry:
    """Return ours, with these knobs of the engine's config."""
    options = {"model": model, "device": device, "threads": threads, "dtype": _DTYPE, "config": config}
    return Entry(Path(sys.executable), "benchmarks.engine.tailrace", options, _threads(threads))


def peer_entry(name: str, model: str, device: str, threads: int) -> Entry | None:
    """Return a peer, or None where it is not installed."""
    options = {"model": model, "device": device, "threads": threads, "dtype": _DTYPE}
    if name == "transformers":
        if find_spec("transformers") is None:
            return None
        return Entry(Path(sys.executable), "benchmarks.engine.transformers", options, _threads(threads))
    python = VLLM_HOME / "bin/python"
    if not python.exists():
        return None
    return Entry(python, "benchmarks.engine.vllm", options, _threads(threads) | _vllm_variables(device, threads))


def judge_entry(model: str, threads: int) -> Entry:
    """Return the fp32 reference."""
    return Entry(
        Path(sys.executable), "benchmarks.engine.judge", {"model": model, "threads": threads}, _threads(threads)
    )


def _threads(threads: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def _vllm_variables(device: str, threads: int) -> dict[str, str]:
    """Keep its engine in the process and its compiled code here; on a CPU say so, and give it the same cores."""
    own = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(VLLM_HOME.parent / "vllm-cache"),
    }
    if device != "cpu":
        return own
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return own | {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
    }
