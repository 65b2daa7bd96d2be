"""Real-world traces: compressed, truncated, odd, old, of several ranks, and from nsys."""

import gzip
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import torch

from models.errors import InvalidRequest
from pipelines.profiler import trace as trace_module
from pipelines.profiler.events import ActivityKind
from pipelines.profiler.report import as_lines, profile_of
from pipelines.profiler.trace import read_traces
from tests.support.profiler.traces import kernel, memcpy, memset, operation, write


def test_a_compressed_trace_is_read_by_its_content(tmp_path: Path) -> None:
    """Compression is detected by content, so a gzip file without the suffix is read."""
    packed = write(tmp_path / "one.json.gz", [kernel("k", 5, 3)])
    renamed = packed.rename(tmp_path / "one.json")

    (trace,) = read_traces([renamed])

    assert [(event.start_us, event.end_us, event.kind) for event in trace.events] == [(0, 3, ActivityKind.KERNEL)]


def test_old_categories_have_the_same_kinds(tmp_path: Path) -> None:
    """Categories from before torch 1.12 have other names and case, and list ranges as operations."""
    events = [
        kernel("k", 0, 1) | {"cat": "Kernel"},
        memcpy(1, 1) | {"cat": "Memcpy"},
        memset(2, 1) | {"cat": "Memset"},
        operation("aten::mm", 3, 1, category="Operator"),
        operation("ProfilerStep#1", 3, 1, category="Operator"),
        operation("cudaLaunchKernel", 4, 1, category="Runtime"),
    ]

    (trace,) = read_traces([write(tmp_path / "old.json", events)])

    assert [event.kind for event in trace.events] == [
        ActivityKind.KERNEL, ActivityKind.COPY, ActivityKind.COPY, ActivityKind.OPERATION, ActivityKind.RANGE, ActivityKind.RUNTIME,
    ]  # fmt: skip


def test_traces_without_kineto_have_their_kinds_by_process(tmp_path: Path) -> None:
    """torch.autograd.profiler without Kineto writes no categories."""
    with torch.autograd.profiler.profile(use_kineto=False) as recorded:
        torch.ones(3) + 1
    recorded.export_chrome_trace(str(tmp_path / "plain.json"))

    (trace,) = read_traces([tmp_path / "plain.json"])

    assert {"aten::ones", "aten::add"} <= {event.name for event in trace.of(ActivityKind.OPERATION)}


def test_events_that_cannot_be_placed_are_counted_and_left_out(tmp_path: Path) -> None:
    """Events with missing, infinite or negative times, and non-events, are skipped and counted."""
    odd = [
        kernel("no time", 0, 1) | {"ts": None},
        kernel("no number", float("nan"), 1),
        kernel("endless", 0, float("inf")),
        kernel("backwards", 9, -2),
        {"ph": "X", "cat": "kernel", "name": "without duration", "ts": 1},
        {"ph": "X"},
        {},
        "no object",
        None,
        operation("of no kind", 0, 1, category="something new"),
        {"ph": "X", "cat": "cpu_op", "ts": "7", "dur": "2", "args": None},
    ]

    (trace,) = read_traces([write(tmp_path / "odd.json", [*odd, kernel("k", 5, 3)])])

    assert [event.name for event in trace.events] == ["k", ""]
    assert sorted(trace.notes) == [
        "1 events were skipped: a duration is negative",
        "2 events were skipped: no object",
        "4 events were skipped: a time is missing or not a number",
    ]


def test_begin_and_end_are_matched_within_their_thread(tmp_path: Path) -> None:
    """B and E events nest per thread, and an E without a B is ignored."""
    lane = {"cat": "cpu_op", "pid": 1, "tid": 1}
    events = [
        {"ph": "E", "ts": 0, **lane},
        {"ph": "B", "ts": 1, "name": "outer", **lane},
        {"ph": "B", "ts": 2, "name": "other thread", **lane, "tid": 2},
        {"ph": "B", "ts": 3, "name": "inner", **lane},
        {"ph": "E", "ts": 4, **lane},
        {"ph": "E", "ts": 6, **lane},
        {"ph": "E", "ts": 9, **lane, "tid": 2},
    ]
    path = tmp_path / "list.json"
    path.write_text(json.dumps(events))

    (trace,) = read_traces([path])

    assert [(event.name, event.duration_us) for event in trace.events] == [
        ("outer", 5),
        ("other thread", 7),
        ("inner", 1),
    ]


@pytest.mark.parametrize("suffix", ["json", "json.gz"])
@pytest.mark.parametrize("share", [0.3, 0.7, 0.999])
def test_a_cut_file_is_named_with_the_fix(tmp_path: Path, suffix: str, share: float) -> None:
    """A truncated file gives an error with a fix instead of a traceback."""
    path = write(tmp_path / f"cut.{suffix}", [kernel(f"kernel {number * 7919}", number, 1) for number in range(200)])
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])

    with pytest.raises(
        InvalidRequest, match=r"--trace: .*cut.*ends in the middle.*; copy it again, or record it again"
    ):
        read_traces([path])


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "does not exist"),
        (b"", "is empty"),
        (b"<html>", "is not JSON at line 1"),
        (b"{}", "without a list of traceEvents"),
        (b'{"traceEvents": []}', "neither a device's activity nor an operation"),
        (b"SQLite format 3\x00 and then nothing of it", "damaged SQLite file"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_by_name(tmp_path: Path, content: bytes | None, why: str) -> None:
    """The error names the option, the file and the fix."""
    path = tmp_path / "it.json"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(InvalidRequest, match=f"--trace: .*{why}") as refused:
        read_traces([path])

    assert "it.json" in str(refused.value)


def test_ranks_come_by_their_number_and_else_in_order(tmp_path: Path) -> None:
    """Ranks come from the files; if two files have the same rank, the given order counts."""
    first, second = (
        write(tmp_path / f"{rank}.json", [kernel("k", 0, rank)], distributedInfo={"rank": rank}) for rank in (2, 1)
    )
    same = write(tmp_path / "same.json", [kernel("k", 0, 3)], distributedInfo={"rank": 2})

    assert [(trace.rank, trace.path) for trace in read_traces([first, second])] == [(1, second), (2, first)]
    assert [(trace.rank, trace.path) for trace in read_traces([first, same])] == [(0, first), (1, same)]


PROCESS = 0x0001_0000_4200_0000


def nsys_report(path: Path) -> Path:
    """Write two processes with a kernel each, with tables and columns of NVIDIA's schema reference."""
    base = sqlite3.connect(path)
    on_device = "start INT, end INT, deviceId INT, contextId INT, streamId INT, correlationId INT, globalPid INT"
    base.executescript(f"""
        CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
        INSERT INTO StringIds VALUES (1, 'void cutlass::Kernel<gemm>'), (2, 'ncclDevKernel_AllReduce'), (3, 'cudaLaunchKernel');
        CREATE TABLE TARGET_INFO_GPU (vmId INT, id INT, name TEXT);
        INSERT INTO TARGET_INFO_GPU VALUES (0, 0, 'NVIDIA A100-SXM4-80GB'), (0, 1, 'NVIDIA A100-SXM4-80GB');
        CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL ({on_device}, demangledName INT, shortName INT);
        INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (5000, 9000, 0, 1, 7, 1, {PROCESS}, 1, 1);
        INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (8000, 15000, 0, 1, 8, 2, {PROCESS}, 2, 2);
        INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (6000, 7000, 1, 1, 7, 1, {PROCESS + (1 << 24)}, 1, 1);
        CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY ({on_device}, bytes INT, copyKind INT);
        INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (1000, 4000, 0, 1, 7, 3, {PROCESS}, 100, 1);
        CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT, end INT, globalTid INT, correlationId INT, nameId INT);
        INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (500, 800, {PROCESS + 17}, 1, 3);
        CREATE TABLE NVTX_EVENTS (start INT, end INT, eventType INT, text TEXT, globalTid INT, textId INT);
        INSERT INTO NVTX_EVENTS VALUES (0, 20000, 59, 'step', {PROCESS + 17}, NULL), (3000, NULL, 34, 'mark', {PROCESS + 17}, NULL);
        INSERT INTO NVTX_EVENTS VALUES (400, 900, 59, 'aten::mm, seq = 3', {PROCESS + 17}, NULL);
    """)
    base.commit()
    base.close()
    return path


def test_an_nsys_report_holds_a_rank_for_each_process(tmp_path: Path) -> None:
    """Times are converted to microseconds, names resolved from the string table, torch's NVTX ranges are operations."""
    first, second = read_traces([nsys_report(tmp_path / "report.sqlite")])

    assert [(event.kind, event.name, event.start_us, event.end_us) for event in first.events] == [
        (ActivityKind.RANGE, "step", 0, 20),
        (ActivityKind.OPERATION, "aten::mm", 0.4, 0.9),
        (ActivityKind.RUNTIME, "cudaLaunchKernel", 0.5, 0.8),
        (ActivityKind.COPY, "memcpy HtoD", 1, 4),
        (ActivityKind.KERNEL, "void cutlass::Kernel<gemm>", 5, 9),
        (ActivityKind.KERNEL, "ncclDevKernel_AllReduce", 8, 15),
    ]
    assert [event.device for event in second.events] == [1]
    assert first.device_names[0] == "NVIDIA A100-SXM4-80GB"


ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x AS id, x AS value, x AS start, x AS end FROM n"
KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
GENERATED = (
    f"CREATE TABLE {KERNEL} (start INT, end INT, text TEXT AS (upper('made by a function')));"
    f"INSERT INTO {KERNEL} VALUES (1, 2);"
)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (f"DROP TABLE {KERNEL}; CREATE VIEW {KERNEL} AS {ENDLESS};", None),
        (f"DROP TABLE StringIds; CREATE VIEW StringIds AS {ENDLESS};", None),
        (f"DROP TABLE {KERNEL}; {GENERATED}", None),
        (f"ALTER TABLE {KERNEL} RENAME COLUMN start TO begin;", "lacks the column start"),
        (
            f"UPDATE {KERNEL} SET start = NULL, deviceId = NULL, globalPid = NULL, shortName = NULL, demangledName = NULL;",
            None,
        ),
        (
            f"UPDATE {KERNEL} SET start = '{'9' * 5_000}', streamId = '{'9' * 5_000}', globalPid = 'x', demangledName = x'00ff';",
            None,
        ),
        (
            "UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET globalTid = NULL, nameId = 'none'; UPDATE NVTX_EVENTS SET globalTid = 1.5;",
            None,
        ),
        ("UPDATE StringIds SET value = x'ff00fe'; UPDATE TARGET_INFO_GPU SET id = 'one', name = NULL;", None),
    ],
)
def test_an_nsys_report_may_hold_anything(tmp_path: Path, script: str, why: str | None) -> None:
    """Views are not read, SQLite functions do not run, and a cell of another type costs at most its row."""
    path = nsys_report(tmp_path / "odd.sqlite")
    with closing(sqlite3.connect(path)) as base:
        base.executescript(script)

    if why is not None:
        with pytest.raises(InvalidRequest, match=why):
            read_traces([path])
        return
    traces = read_traces([path])
    assert all(profile_of(trace).verdict.sentence for trace in traces)
    assert "MADE BY A FUNCTION" not in {event.name for trace in traces for event in trace.events}


def test_pages_that_lead_to_each_other_end(tmp_path: Path) -> None:
    """SQLite's steps are limited by the file's size, so cyclic pages terminate."""
    path = tmp_path / "pages.sqlite"
    with closing(sqlite3.connect(path)) as base:
        base.executescript(
            f"CREATE TABLE {KERNEL} (start INT, end INT); WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < 9000) INSERT INTO {KERNEL} SELECT x, x + 1 FROM n;"
        )
        (root,) = base.execute(f"SELECT rootpage FROM sqlite_master WHERE name = '{KERNEL}'").fetchone()
    pages = bytearray(path.read_bytes())
    start = (root - 1) * 4_096
    children = int.from_bytes(pages[start + 3 : start + 5], "big")
    places = [start + 12 + 2 * number for number in range(children)]
    cells = [start + int.from_bytes(pages[offset : offset + 2], "big") for offset in places]
    leaf = pages[cells[0] : cells[0] + 4]
    for level in range(6):  # a chain of interior pages; every cell leads to the next page
        target = leaf if level == 5 else (int.from_bytes(leaf, "big") + level + 1).to_bytes(4, "big")
        page = start if level == 0 else (int.from_bytes(leaf, "big") + level - 1) * 4_096
        pages[page : page + 4_096] = pages[start : start + 4_096]
        for cell in cells:
            pages[page + cell - start : page + cell - start + 4] = target
        pages[page + 8 : page + 12] = target
    path.write_bytes(pages)

    with pytest.raises(InvalidRequest, match=r"damaged SQLite file|more than"):
        read_traces([path])


@pytest.mark.parametrize("suffix", ["json", "json.gz"])
@pytest.mark.parametrize(("filler", "limit"), [(b"x", "MAX_BYTES"), (b"[]", "_MAX_NESTED"), (b"0", "_MAX_ITEMS")])
def test_a_trace_has_a_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, filler: bytes, limit: str
) -> None:
    """Bytes, objects and numbers are limited before they become Python objects, also while decompressing."""
    monkeypatch.setattr(trace_module, limit, 1_000)
    content = (
        b'{"traceEvents": ["' + filler * 2_000 + b'"]}'
        if filler == b"x"
        else b'{"traceEvents": [' + b",".join([filler] * 2_000) + b"]}"
    )
    path = tmp_path / f"large.{suffix}"
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)

    with pytest.raises(InvalidRequest, match=r"holds more than .*; record fewer steps"):
        read_traces([path])


def test_numbers_and_names_of_any_length_are_read(tmp_path: Path) -> None:
    """Huge numbers, lone surrogates, terminal escapes and long names are handled."""
    digits = "9" * 5_000
    path = write(tmp_path / "long.json", [kernel("\ud800\x1b[2J" + "n" * 9_000, 0, 2_000), kernel("k", 2, 1)])
    path.write_text(
        path.read_text().replace('"ts": 2', f'"ts": {digits}').replace('"stream": 7', f'"stream": {digits}')
    )

    (trace,) = read_traces([path])

    assert len(trace.events) == 1
    printed = "\n".join(as_lines([profile_of(trace)]))
    assert printed.encode()
    assert "\x1b" not in printed


def test_an_nsys_report_without_a_device_names_the_command(tmp_path: Path) -> None:
    """Only processes with device activity become ranks."""
    path = tmp_path / "empty.sqlite"
    base = sqlite3.connect(path)
    base.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL)")
    base.commit()
    base.close()

    with pytest.raises(InvalidRequest, match="nsys profile --trace=cuda,nvtx"):
        read_traces([path])
