"""Fuzzed trace files are either read, analysed and printed, or rejected with InvalidRequest.

`pytest -m grid tests/unit/pipelines/profiler/test_fuzzed_traces.py` runs 100,000 files.
"""

import gzip
import json
import random
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from models.errors import InvalidRequest
from pipelines.profiler.report import as_json, as_lines, profile_of
from pipelines.profiler.timeline import as_html
from pipelines.profiler.trace import read_traces
from tests.support.profiler.traces import kernel, memcpy, operation
from tests.unit.pipelines.profiler.test_trace import nsys_report

EVENTS: list[Any] = [
    operation(
        "aten::mm", 0, 30, **{"Input Dims": [[64, 64], [64, 64]], "Input type": ["float", "float"], "External id": 5}
    ),
    operation("cudaLaunchKernel", 10, 5, category="cuda_runtime", correlation=7),
    kernel("void cutlass::Kernel<ampere_sgemm_128x64_nn>(int)", 20, 3_000, correlation=7),
    kernel("_ZN7cutlass13device_kernelINS_4gemm6kernel13GemmUniversalE", 4_000, 300),
    kernel("ncclDevKernel_AllReduce", 4_200, 3_000, stream=9),
    memcpy(9_000, 200),
    operation("enumerate(DataLoader)#next", 0, 900, category="user_annotation"),
    operation("dataloader.py(1): __next__", 0, 9_000, category="python_function"),
    {"ph": "B", "cat": "cpu_op", "pid": 1, "tid": 1, "ts": 1, "name": "b"},
    {"ph": "E", "cat": "cpu_op", "pid": 1, "tid": 1, "ts": 5},
]
ABOUT = {
    "deviceProperties": [{"id": 0, "name": "NVIDIA A100"}],
    "distributedInfo": {"rank": 0},
    "tailrace": {"dtype": "fp32", "flops_per_s": 1e12, "bytes_per_s": 1e10, "operations": {"aten::mm": [1e6, 1e5]}},
}
TABLES = (
    "StringIds",
    "TARGET_INFO_GPU",
    "CUPTI_ACTIVITY_KIND_KERNEL",
    "CUPTI_ACTIVITY_KIND_MEMCPY",
    "CUPTI_ACTIVITY_KIND_RUNTIME",
    "NVTX_EVENTS",
)


def odd(draw: random.Random, depth: int = 0) -> Any:
    """Return a value of any type and size."""
    values: list[Callable[[], Any]] = [
        lambda: None,
        lambda: draw.choice([True, False, "", "\ud800", "\x00\x1b[31m", "1e999", "x" * 5_000, "9" * 5_000]),
        lambda: draw.choice([0, -1, 2**31, 2**63, -(2**64), 10**40, 10**300, 10**4_299]),
        lambda: draw.choice([0.5, -1e308, 1e308, 5e-324, float("nan"), float("inf")]),
        lambda: draw.randint(-10, 10_000),
        lambda: [odd(draw, depth + 1) for _ in range(draw.randint(0, 3))] if depth < 3 else [],
        lambda: {draw.choice(["id", "name", "ts", "operations"]): odd(draw, depth + 1)} if depth < 3 else {},
    ]
    return draw.choice(values)()


def changed(draw: random.Random, tree: Any) -> Any:
    """Replace some values, keys or members anywhere in a tree."""
    if draw.random() < 0.02:
        return odd(draw)
    if isinstance(tree, dict):
        kept = {key: changed(draw, value) for key, value in tree.items() if draw.random() > 0.01}
        return kept | ({draw.choice(list(kept or {"x": 0})): odd(draw)} if draw.random() < 0.05 else {})
    return [changed(draw, child) for child in tree] if isinstance(tree, list) else tree


def flipped(draw: random.Random, content: bytes) -> bytes:
    """Change, cut or repeat bytes."""
    some = bytearray(content)
    for _ in range(draw.randint(1, 12)):
        position = draw.randrange(len(some))
        match draw.randrange(4):
            case 0:
                some[position] = draw.randrange(256)
            case 1:
                some[position : position + draw.randint(1, 8)] = b""
            case 2:
                some[position:position] = draw.randbytes(draw.randint(1, 8))
            case _:
                some[position : position + 4] = draw.choice([b"\xff\xff\xff\xff", b"\0\0\0\0", b"[[[[", b"9999"])
        some = some or bytearray(b"x")
    return bytes(some[: draw.randrange(len(some))] if draw.random() < 0.1 else some)


def a_json(draw: random.Random, template: Path, path: Path) -> None:
    """Write a trace with odd values or bytes, compressed or not."""
    del template
    content = json.dumps(changed(draw, {**ABOUT, "traceEvents": EVENTS})).encode()
    content = flipped(draw, content) if draw.random() < 0.3 else content
    packed = gzip.compress(content, 1) if draw.random() < 0.1 else content
    path.write_bytes(flipped(draw, packed) if packed is not content and draw.random() < 0.5 else packed)


def cell(draw: random.Random) -> str | bytes | float | None:
    """Return a value of an SQLite type."""
    value = odd(draw)
    if isinstance(value, float | None):
        return value
    return draw.randbytes(3) if isinstance(value, list | dict) else str(value).encode(errors="replace").decode()


def a_report(draw: random.Random, template: Path, path: Path) -> None:
    """Write an nsys report with odd cells or columns."""
    path.write_bytes(template.read_bytes())
    with closing(sqlite3.connect(path)) as base:
        for _ in range(draw.randint(1, 4)):
            table = draw.choice(TABLES)
            columns = [row[1] for row in base.execute(f"PRAGMA table_info({table})")]
            column = draw.choice(columns)
            with suppress(sqlite3.Error):  # for example a key of another type
                if draw.random() < 0.9:
                    base.execute(f"UPDATE OR IGNORE {table} SET {column} = ?", (cell(draw),))
                else:
                    base.execute(f"ALTER TABLE {table} RENAME COLUMN {column} TO other{draw.randrange(10**6)}")
        base.commit()


def a_damaged_report(draw: random.Random, template: Path, path: Path) -> None:
    path.write_bytes(flipped(draw, template.read_bytes()))


def is_read(path: Path, *, judges: bool) -> bool:
    """Read a file, optionally analyse and print it; return whether it was read. Only InvalidRequest is caught.

    Parts add up to the span, and shares to 1.
    """
    try:
        traces = read_traces([path])
    except InvalidRequest:
        return False
    if not judges:
        return True
    profiles = [profile_of(trace) for trace in traces]
    for row in json.loads(json.dumps(as_json(profiles)))["ranks"]:
        parts = (row[f"{name}_us"] for name in ("compute", "communication_exposed", "copy_exposed", "idle"))
        assert sum(parts) == pytest.approx(row["span_us"], rel=1e-6, abs=1e-6)
        assert sum(row["shares"].values()) == pytest.approx(1, abs=1e-6)
    assert "\n".join(as_lines(profiles)).encode()
    assert as_html(profiles).encode()
    return True


def run(make: Callable[[random.Random, Path, Path], None], numbers: range, tmp_path: Path, judged: int = 1) -> int:
    """Try a file per number and analyse every `judged`-th; return how many were read."""
    template, path, num_read = nsys_report(tmp_path / "template"), tmp_path / "fuzzed", 0
    for number in numbers:
        make(random.Random(number), template, path)
        try:
            num_read += is_read(path, judges=number % judged == 0)
        except Exception as error:  # the seed recreates the file
            raise AssertionError(f"{make.__name__} {number}: {type(error).__name__}: {error}") from error
    return num_read


MAKERS = {a_json: 0.7, a_report: 0.1, a_damaged_report: 0.2}
"""The fraction of inputs of each kind."""
NUM_WHOLE = 3_000


@pytest.mark.parametrize("make", MAKERS)
def test_a_file_with_anything_in_it_is_judged_or_refused(tmp_path: Path, make) -> None:
    """A sample of each kind runs without unexpected exceptions, and some files are readable."""
    assert run(make, range(60), tmp_path) > 0


@pytest.mark.grid
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("make", MAKERS)
def test_many_files_are_judged_or_refused(tmp_path: Path, make, request: pytest.FixtureRequest) -> None:
    """No undeclared exception in `--foreign-inputs` files (default: 3,000); each tenth is judged and printed too."""
    number = round(MAKERS[make] * (request.config.getoption("--foreign-inputs") or NUM_WHOLE))
    assert run(make, range(1_000_000, 1_000_000 + number), tmp_path, judged=10) > 0
