"""The steps of `make gpu-check`: commands, order, concurrency and time limits. Pure.

The most important steps come first. Their limits add up to less than the total of 8 minutes, including start-up.
"""

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TOTAL_S = 480
_KERNEL_TESTS = (
    "tests/unit/llm/engine/gpu/test_triton_kernels.py",
    "tests/unit/llm/engine/gpu/test_triton_attention.py",
    "tests/unit/llm/engine/test_device.py",
)
_NUM_ORACLE_CASES, _TINY_ORACLE_CASES = 36, 2


@dataclass(frozen=True, slots=True)
class Step:
    """A process and its time limit. Steps of one `stage` run concurrently; `is_extra` steps run only with `--part`."""

    name: str
    stage: str
    command: tuple[str, ...]
    limit_s: int
    is_extra: bool = False


def steps(out: Path, scratch: Path, *, tiny: bool) -> Iterator[Step]:
    """Yield the steps. Results go to `out`, which may hold eight files in total, everything else to `scratch`."""
    device, small = ("cpu", ("--tiny",)) if tiny else ("cuda", ())

    def measured(name: str, limit_s: int, *words: str, is_extra: bool = False, module: str = "") -> Step:
        file = str(out / f"{name}.json")
        limit = ("--limit-s", str(limit_s)) if module == "cases" else ()
        command = _module(f"benchmarks.gpu.{module or name}", *words, device, file, *limit, *small)
        return Step(name, name, command, limit_s, is_extra)

    yield measured("smoke", 20)
    number, processes = (str(_TINY_ORACLE_CASES), "1") if tiny else (str(_NUM_ORACLE_CASES), "4")
    oracle = (device, number, "--processes", processes, "--json", str(out / "oracle.json"))
    yield Step("oracle", "kernels", _module("tests.support.engine.attention_oracle", *oracle), 75)
    if importlib.util.find_spec("pytest") is not None:
        yield Step("tests", "kernels", _tests(scratch, tiny=tiny), 75)
    yield Step("compile", "kernels", _module("benchmarks.gpu.compile", device, *small), 75)
    yield measured("beams", 150, "beams", module="cases")
    yield measured("text", 75, "text", module="cases")
    yield measured("profile", 75)
    yield measured("train", 45)
    yield measured("beams-product", 150, "beams-product", module="cases", is_extra=True)
    yield measured("foreign", 150, "foreign", module="cases", is_extra=True)
    yield Step("kernel-tests", "kernel-tests", (*_pytest(8), *_KERNEL_TESTS), 160, is_extra=True)


def _tests(scratch: Path, *, tiny: bool) -> tuple[str, ...]:
    """Return the command of the GPU tests."""
    engine = "tests/gpu/test_engine_on_gpu.py"
    if tiny:  # without a GPU all of them are skipped: one kernel test runs in Triton's interpreter
        return (*_pytest(2), engine, _KERNEL_TESTS[0], "-k", "on_gpu or test_norms")
    return (*_pytest(8), f"--junit-xml={scratch / 'tests.xml'}", engine)


def _pytest(num_processes: int) -> tuple[str, ...]:
    spread = ("-n", str(num_processes)) if importlib.util.find_spec("xdist") is not None else ()
    return _module("pytest", "-c", "tests/gpu/pytest.ini", "-p", "no:cacheprovider", "--maxfail", "3", *spread)


def _module(name: str, *words: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name, *words)
