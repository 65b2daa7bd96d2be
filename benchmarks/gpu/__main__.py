"""Everything that a graphics card must show, in one command of at most 25 minutes, into one folder.

    python -m benchmarks.gpu OUT [--tiny]

Needs torch, triton, numpy, safetensors and tokenizers; with pytest and hypothesis the kernels' own tests run too. Each step is a process
of its own with a limit of time, and writes into OUT as it goes: one that fails or hangs costs its own results only. `summary.json` says
how each ended, and the command exits with 1 if one failed. `--tiny` runs the same steps at their smallest on a CPU, in Triton's
interpreter.
"""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_KERNEL_TESTS = (
    "tests/unit/llm/engine/gpu/test_triton_kernels.py",
    "tests/unit/llm/engine/gpu/test_triton_attention.py",
    "tests/unit/llm/engine/test_device.py",
)
_SLOWER = 6
"""On a CPU that others use too, the limits are this many times longer."""


@dataclass(frozen=True, slots=True)
class Step:
    """One process, its limit of time, and the file of the folder that keeps its output."""

    name: str
    command: tuple[str, ...]
    limit_s: int


@dataclass(frozen=True, slots=True)
class Ended:
    """How a step ended; `code` None: it was stopped at its limit."""

    name: str
    command: str
    code: int | None
    seconds: float


def main() -> None:
    """Run the steps, write the summary after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--tiny", action="store_true", help="each step at its smallest, on a CPU")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    ended: list[Ended] = []
    for step in steps(options.out.resolve(), tiny=options.tiny):
        ended.append(run(step, options.out, interpreted=options.tiny))
        print(f"{step.name}: {ended[-1].code} after {ended[-1].seconds:.0f} s", flush=True)
        (options.out / "summary.json").write_text(json.dumps([asdict(one) for one in ended], indent=1) + "\n")
    sys.exit(any(one.code != 0 for one in ended))


def steps(out: Path, *, tiny: bool) -> Iterator[Step]:
    """Yield the steps, those without which the others mean nothing first. Their limits add up to 25 minutes."""
    device = "cpu" if tiny else "cuda"
    small = ("--tiny",) if tiny else ()
    yield Step("machine", _module("torch.utils.collect_env"), 60)
    yield Step("oracle", _module("tests.support.engine.attention_oracle", device, "100" if tiny else "1"), 300)
    if not tiny:
        yield from _tests()
    for settings in ("benchmark", "product"):
        result = ("--json", str(out / f"engine-{settings}.json"), "--settings", settings)
        words = (
            ("--case", "qwen3-1.7b-beams-16-context-40-batch-1", "--tiny", "--rounds", "1")
            if tiny
            else ("--device", "cuda")
        )
        yield Step(f"engine-{settings}", _module("benchmarks.engine", "--peers", "", *result, *words), 300)
    yield Step("train", _module("benchmarks.gpu.train", device, str(out / "train.json"), *small), 80)
    yield Step("profile", _module("benchmarks.gpu.profile", device, str(out / "profile.json"), *small), 100)


def _tests() -> Iterator[Step]:
    """Yield, with pytest, all tests of the card; without, those of the engine alone, by a runner that knows what they use of it."""
    engine = "tests/gpu/test_engine_on_gpu.py"
    if importlib.util.find_spec("pytest") is None:
        yield Step("tests", _module("tests.support.engine.plain_runner", engine), 200)
        return
    pytest = _module("pytest", "-c", "tests/gpu/pytest.ini", "-p", "no:cacheprovider", "--maxfail", "3")
    yield Step("tests", (*pytest, engine), 200)
    if importlib.util.find_spec("hypothesis") is not None:
        yield Step("kernel-tests", (*pytest, *_KERNEL_TESTS), 160)


def _module(name: str, *words: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name, *words)


def run(step: Step, out: Path, *, interpreted: bool) -> Ended:
    """Run one step to its end or to its limit, with its output in a file."""
    began_s = time.monotonic()
    variables = ("TRITON_INTERPRET=1", "OMP_NUM_THREADS=1") if interpreted else ()
    limit_s = step.limit_s * (_SLOWER if interpreted else 1)
    with (out / f"{step.name}.txt").open("w") as output:
        process = subprocess.Popen(
            ("/usr/bin/env", *variables, *step.command),
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        code = _code_within(limit_s, process)
    return Ended(step.name, " ".join(step.command), code, time.monotonic() - began_s)


def _code_within(limit_s: int, process: subprocess.Popen[bytes]) -> int | None:
    """Wait for a process; None at the limit. It is then killed with those that it started, which would keep the card's memory."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


if __name__ == "__main__":
    main()
