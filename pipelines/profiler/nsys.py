"""Reads the SQLite files that `nsys export --type sqlite` writes.

Files are untrusted. Only stored tables and the needed columns are read, without SQLite functions, and with a bound on
SQLite VM steps that grows with the file: views, virtual tables, generated columns and damaged pages could run forever.
Times are nanoseconds. Tables and columns follow NVIDIA's "SQLite Export Schema Reference"; each table exists only if
something was recorded.
"""

import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from models.errors import InvalidRequest
from pipelines.profiler.events import FIELD, ActivityKind, Trace, TraceEvent, number_of, placed, skipped_notes, text_of

_PROCESS_OF_THREAD = ~0xFFFFFF
"""nsys puts the thread into the lowest 24 bits of `globalTid`; the rest is the process, as in `globalPid`."""
_DEVICE_TABLES = {
    "CUPTI_ACTIVITY_KIND_KERNEL": ActivityKind.KERNEL,
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": ActivityKind.KERNEL,
    "CUPTI_ACTIVITY_KIND_MEMCPY": ActivityKind.COPY,
    "CUPTI_ACTIVITY_KIND_MEMSET": ActivityKind.COPY,
}
_HOST_TABLES = {"CUPTI_ACTIVITY_KIND_RUNTIME": ActivityKind.RUNTIME, "NVTX_EVENTS": ActivityKind.RANGE}
_NEEDED = ("start", "end")
_NAMES = ("text", "demangledName", "shortName", "nameId", "textId")
_COLUMNS = (*_NEEDED, *_NAMES, "deviceId", "streamId", "globalPid", "globalTid", "correlationId", "copyKind")
_COPY_KINDS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}
"""CUPTI's codes of copy directions."""
_MAX_ROWS = 5_000_000
_MAX_VALUE_BYTES = 2**20
_MIN_ROW_BYTES = 5
"""Per row on a page: its place, length, number and header."""
_STEPS, _STEPS_A_BYTE, _CHECK_EVERY = 100_000, 4, 1_000
"""A scan takes one step per column and three per row."""
_READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ}

Row = Mapping[str, Any]


def read_nsys(path: Path) -> list[Trace]:
    """Read the processes that used a device. Raises InvalidRequest."""
    by_process: dict[int, list[TraceEvent]] = {}
    skipped: Counter[str] = Counter()
    try:
        with closing(_opened(path)) as base:
            tables = _tables(base)
            strings = {row["id"]: row["value"] for row in _rows(base, tables, "StringIds", ("id", "value"))}
            names = {row["id"]: text_of(row["name"]) for row in _rows(base, tables, "TARGET_INFO_GPU", ("id", "name"))}
            most = min(_MAX_ROWS, path.stat().st_size // _MIN_ROW_BYTES)
            for table, kind in (_DEVICE_TABLES | _HOST_TABLES).items():
                for number, row in enumerate(_rows(base, tables, table, _COLUMNS)):
                    if number > most:
                        raise InvalidRequest(
                            FIELD, f"{table} of {path} has more than {most:,} rows", "record fewer steps"
                        )
                    process, event = _event(table, kind, row, strings)
                    skipped["a time is missing or a duration is negative"] += (
                        event is None and kind is not ActivityKind.RANGE
                    )
                    if event is not None:
                        by_process.setdefault(process, []).append(event)
    except (sqlite3.Error, UnicodeDecodeError) as error:  # SQLite quotes damaged names in its errors
        raise InvalidRequest(
            FIELD, f"{path} is a damaged SQLite file ({error})", "run `nsys export --type sqlite` again"
        ) from error
    ranks = [events for _, events in sorted(by_process.items()) if any(event.is_on_device for event in events)]
    if not ranks:
        raise InvalidRequest(
            FIELD, f"{path} holds no activity of a device", "record with `nsys profile --trace=cuda,nvtx`"
        )
    devices = {number: name for number, name in names.items() if isinstance(number, int)}
    notes = skipped_notes(skipped)
    return [Trace(path, rank, placed(events), devices, None, notes) for rank, events in enumerate(ranks)]


def _opened(path: Path) -> sqlite3.Connection:
    """Open a file that is neither locked nor written. A query ends after a number of steps that follows its size."""
    base = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
    base.text_factory = lambda content: content.decode(errors="replace")
    base.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
    most = (_STEPS + _STEPS_A_BYTE * path.stat().st_size) // _CHECK_EVERY
    num_checks = 0

    def is_over() -> bool:
        nonlocal num_checks
        num_checks += 1
        return num_checks > most

    base.set_progress_handler(is_over, _CHECK_EVERY)
    return base


def _tables(base: sqlite3.Connection) -> dict[str, set[str]]:
    """Return the stored columns of each table with its own pages, which excludes views and virtual tables.

    Afterwards only reads are allowed.
    """
    rows = base.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND rootpage > 0").fetchall()
    wanted = {"StringIds", "TARGET_INFO_GPU", *_DEVICE_TABLES, *_HOST_TABLES} & {name for (name,) in rows}
    tables = {
        table: {name for _, name, *_, hidden in base.execute(f'PRAGMA table_xinfo("{table}")') if not hidden}
        for table in wanted
    }
    base.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in _READS else sqlite3.SQLITE_DENY)
    return tables


def _rows(
    base: sqlite3.Connection, tables: Mapping[str, set[str]], table: str, wanted: tuple[str, ...]
) -> Iterator[Row]:
    """Yield a table's rows with the wanted columns that exist; nothing if the table does not exist."""
    if table not in tables:
        return
    columns = [name for name in wanted if name in tables[table]]
    if missing := [name for name in wanted if name in _required(wanted) and name not in columns]:
        raise InvalidRequest(
            FIELD,
            f"{table} lacks the column {missing[0]} of nsys's schema",
            "export it with `nsys export --type sqlite`",
        )
    names = ", ".join(f'"{name}"' for name in columns)
    for row in base.execute(f'SELECT {names} FROM "{table}"'):  # noqa: S608 (names of ours)
        yield dict(zip(columns, row, strict=True))


def _required(wanted: tuple[str, ...]) -> tuple[str, ...]:
    return _NEEDED if wanted is _COLUMNS else wanted


def _event(table: str, kind: ActivityKind, row: Row, strings: Mapping[Any, Any]) -> tuple[int, TraceEvent | None]:
    on_device = table in _DEVICE_TABLES
    process = (
        _whole(row, "globalPid") if on_device and "globalPid" in row else _whole(row, "globalTid") & _PROCESS_OF_THREAD
    )
    start_us, end_us = (number_of(row[name]) / 1_000 for name in _NEEDED)
    if not (start_us <= end_us and abs(start_us) < _MAX_US and abs(end_us) < _MAX_US):
        return process, None
    name = _name(table, row, strings)
    args: dict[str, Any] = {"correlation": row["correlationId"]} if "correlationId" in row else {}
    if on_device:
        thread = (_whole(row, "deviceId"), _whole(row, "streamId"))
        args["device"] = thread[0]
    else:
        thread = (process, _whole(row, "globalTid"))
    if kind is ActivityKind.RANGE and name.startswith("aten::"):  # torch.autograd.profiler.emit_nvtx
        kind, name = ActivityKind.OPERATION, name.partition(",")[0]
    return process, TraceEvent(kind, name, start_us, end_us, thread, args)


_MAX_US = 1e18


def _whole(row: Row, name: str) -> int:
    """Return an integer of the row, 0 if null."""
    value = row.get(name)
    return value if isinstance(value, int) else 0


def _name(table: str, row: Row, strings: Mapping[Any, Any]) -> str:
    if row.get("text"):
        return text_of(row["text"])
    for column in _NAMES[1:]:
        if row.get(column) is not None:
            return text_of(strings.get(row[column]) or "")
    direction = _COPY_KINDS.get(_whole(row, "copyKind"), "")
    return f"{table.rpartition('_')[2].lower()} {direction}".rstrip()
