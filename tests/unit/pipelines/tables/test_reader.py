"""Both commands read a table alike: pipeline and import get the same rows, counts and notes."""

import gzip
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.data.ingest import IngestSources, open_tables
from pipelines.imports.old_events import OldEvents
from pipelines.imports.records import item_changes
from pipelines.imports.run import ImportRun, import_events, import_items
from pipelines.imports.sources import local_file
from pipelines.tables.findings import Findings
from pipelines.tables.options import PLAIN, ItemArguments, TableOptions
from pipelines.tables.reader import EventTable, ItemTable, open_table
from pipelines.tables.times import times
from services.contracts.events import decode_interaction
from services.contracts.items import ItemState, decode_item
from services.errors import ConfigError, DataError, EnvironmentFault
from services.items.live_items import LiveItems
from tests.support.item_topic import ItemTopic
from tests.support.servers import free_port

NOW_MS = 1_780_100_000_000
"""A day after the events of most cases."""
AT = datetime(2026, 5, 28, 20, 26, 40, tzinfo=UTC)
DAY = datetime(2026, 5, 28, tzinfo=UTC)
HEADER = "user_id,item_id,event_time,event_type,value\n"
ITEMS = "item_id,title,categories\n"


@dataclass(frozen=True)
class Case:
    """A file and its expected content.

    Args:
        content: The file's content.
        rows: Expected values of each accepted row, by column.
        aside: Row numbers of rejected rows, by reason.
        notes: Texts that must each occur in a note.
        options: The command's options.
    """

    content: str | bytes
    rows: list[tuple[Any, ...]]
    aside: dict[str, list[int]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    options: TableOptions = PLAIN
    name: str = "table.csv"


def written(folder: Path, case: Case) -> Path:
    """Write the file of a case."""
    path = folder / case.name
    path.write_bytes(case.content if isinstance(case.content, bytes) else case.content.encode())
    return path


def items_of(path: Path, options: TableOptions, folder: Path) -> list[tuple[Any, Findings]]:
    """Return (rows, findings) of both commands: rows are (id, title, categories)."""
    table, _ = open_tables(IngestSources(None, path, (), tables=options), folder)
    piped = [(row["item_id"], row["title"], row["categories"]) for row in table.read_catalogue().to_dicts()]
    sent: list[Any] = []
    run = ImportRun(path=path, options=options, send=sent.extend, progress_file=folder / "p.json", scratch=folder / "s")
    _, findings = import_items(run, folder / "delivered.json", ItemTopic().catalogue)
    states = [decode_item(key, value) for key, value, _ in sent]
    imported = [(name, state.title or name, [*(state.categories or ())]) for name, state in states if state is not None]
    return [(piped, table.findings), (imported, findings)]


def events_of(path: Path, options: TableOptions, folder: Path) -> list[tuple[Any, Findings]]:
    """Return (rows, findings) of both commands: rows are (user, item, time, type, value), by time."""
    (folder / "items.csv").write_text("item_id\na\n")
    _, table = open_tables(IngestSources(path, folder / "items.csv", (), tables=options), folder)
    assert table is not None
    columns = ("user_id", "item_id", "event_time", "event_type", "value")
    read = table.read().sort("event_time", maintain_order=True)
    read = read.with_columns(pl.col("event_time").dt.truncate("1ms"))  # the stream's resolution
    piped = [tuple(row[name] for name in columns) for row in read.to_dicts()]
    sent: list[Any] = []
    run = ImportRun(path=path, options=options, send=sent.extend, progress_file=folder / "p.json", scratch=folder / "s")
    old = OldEvents(folder / "old.parquet")
    _, findings = import_events(run, old, NOW_MS)
    events = [decode_interaction(value) for _, value in sent]
    imported = [(event.user_id, event.item_id, event.event_time_ms, event.event_type, event.value) for event in events]
    old.finish()
    if (folder / "old.parquet").exists():
        imported = [*pl.read_parquet(folder / "old.parquet").select(columns).rows(), *imported]
    read_times = [
        (*row[:2], datetime.fromtimestamp(row[2] / 1_000, UTC), *row[3:])
        for row in sorted(imported, key=lambda row: row[2])
    ]
    return [(piped, table.findings), (read_times, findings)]


def found(case: Case, read: Callable[..., list[tuple[Any, Findings]]], folder: Path) -> list[tuple[Any, Findings]]:
    """Read a case's file with both commands and assert that the results agree."""
    outcomes = read(written(folder, case), case.options, folder)
    (rows, piped), (others, imported) = outcomes
    assert rows == others
    assert piped.sentences() == imported.sentences()
    assert (piped.num_rows, piped.num_duplicates) == (imported.num_rows, imported.num_duplicates)
    return outcomes


def parquet(**columns: Any) -> bytes:
    """Return two valid events as Parquet, with columns replaced."""
    good = {"user_id": ["u", "v"], "item_id": ["a", "a"], "event_time": [1_780_000_000, 1_780_000_001]}
    buffer = io.BytesIO()
    pq.write_table(pa.table(good | columns), buffer)
    return buffer.getvalue()


def lines(*rows: dict[str, Any] | str) -> str:
    """Return JSON Lines of events with fields replaced; a string is used as the line."""
    good = {"user_id": "u", "item_id": "a", "event_time": 1_780_000_000}
    return "".join(f"{row if isinstance(row, str) else json.dumps(good | row)}\n" for row in rows)


def user(text: str) -> str:
    """Return a table with an event of this user, and an event of user 8."""
    return f"{HEADER}{text},a,1780000000,buy,1\n8,a,1780000001,buy,1\n"


FLOATS = "user_id are written as floating-point numbers and read as integers"
IDS = {
    "7.0": (["7", "8"], {}, (FLOATS,)),
    "007": (["007", "8"], {}, ()),
    " 7 ": (["7", "8"], {}, ("user_id have blanks around them",)),
    "1e+05": (["100000", "8"], {}, (FLOATS,)),
    "1.23457E+11": (["8"], {"user_id": [2]}, ()),
    '"7"': (["7", "8"], {}, ()),
    "7.5": (["7.5", "8"], {}, ()),
    **{
        word: (["8"], {"user_id": [2]}, ("words for a missing one",))
        for word in ("NA", "null", "-", "—", "NaN", "None", "\\N")
    },
    "": (["8"], {"user_id": [2]}, ()),
}


@pytest.mark.parametrize("text", IDS)
def test_an_id_is_read_alike_however_it_is_written(text: str, tmp_path: Path) -> None:
    """Whole numbers lose formatting added by tools; placeholders and truncated numbers are not valid ids."""
    users, aside, notes = IDS[text]
    (rows, findings), _ = found(Case(user(text), []), events_of, tmp_path)

    assert [row[0] for row in rows] == users
    assert {reason: group.rows for reason, group in findings.set_aside.items()} == aside
    assert [part for part in notes if not any(part in str(note) for note in findings.notes)] == []


TIMES = {
    **dict.fromkeys(
        ("1780000000", "1780000000000", "1780000000000000", "1780000000000000000", "1780000000.0", "1.78e9"), AT
    ),
    **dict.fromkeys(
        ("2026-05-28T20:26:40Z", "2026-05-28T22:26:40+02:00", "2026-05-28T22:26:40+0200", "2026-05-28T22:26:40+02"), AT
    ),
    **dict.fromkeys(("2026-05-28 20:26:40", "2026-05-28 20:26:40 UTC", "2026/05/28 20:26:40", "20260528T202640Z"), AT),
    **dict.fromkeys(("20260528202640", "Thu, 28 May 2026 20:26:40 GMT", "Thu, 28 May 2026 22:26:40 +0200"), AT),
    **dict.fromkeys(("05/28/2026 8:26:40 PM", "28/05/2026 20:26:40", "28.05.2026 20:26:40", " 1780000000 "), AT),
    **dict.fromkeys(("28/May/2026:20:26:40 +0000", "Thu May 28 20:26:40 2026", "May 28, 2026 8:26:40 PM"), AT),
    **dict.fromkeys(
        ("2026-05-28", "20260528", "28/05/2026", "05/28/2026", "28 May 2026", "2026-W22-4", "20260528.0"), DAY
    ),
    "2026-05-28T20:26:40.123456789Z": AT + timedelta(milliseconds=123),
    "2026-05-28T20:26:40,5": AT + timedelta(milliseconds=500),
    **dict.fromkeys(
        ("soon", "-5", "9999-12-31", "2026-02-30", "20260230", "", "nan", "1e400", "9" * 400, "true"), None
    ),
    "01/02/2026": None,
}


@pytest.mark.parametrize("text", TIMES)
def test_a_time_is_read_alike_however_it_is_written(text: str, tmp_path: Path) -> None:
    """Any unambiguous unit and format is accepted; other times are rejected."""
    content = f'user_id,item_id,event_time\nu,a,"{text}"\nv,a,2026-05-28T21:00:01Z\n'
    (rows, findings), _ = found(Case(content, []), events_of, tmp_path)

    expected = TIMES[text]
    read = [row[2] for row in rows if row[0] == "u"]
    assert read == ([] if expected is None else [expected])
    assert [group.rows for group in findings.set_aside.values()] == ([[2]] if expected is None else [])


VALUES = {
    "2.5": 2.5,
    " 2.5 ": 2.5,
    "$4": 4.0,
    "1,5": 1.5,
    "1,234.5": 1234.5,
    "4 €": 4.0,
    "": 1.0,
    "—": 1.0,
    "NaN": 1.0,
    "true": 1.0,
    "False": 0.0,
} | dict.fromkeys(("abc", "inf", "1e400", "1_000", "1,234"), 1.0)


@pytest.mark.parametrize("text", VALUES)
def test_a_value_that_is_no_number_costs_the_value(text: str, tmp_path: Path) -> None:
    """Values that are not numbers are dropped, and counted unless the cell was empty."""
    (rows, findings), _ = found(Case(f'{HEADER}u,a,1780000000,buy,"{text}"\n', []), events_of, tmp_path)

    assert [row[4] for row in rows] == [VALUES[text]]
    assert findings.num_unread.get("value", 0) == (text in ("abc", "inf", "1e400", "1_000", "1,234"))


U, V = ("u", "a", AT, "buy", 1.0), ("v", "a", AT + timedelta(seconds=1), "buy", 1.0)
GOOD = f"{HEADER}u,a,1780000000,buy,1\nv,a,1780000001,buy,1\n"
WITHOUT_TYPE = [("u", "a", AT, "interaction", 1.0), ("v", "a", AT + timedelta(seconds=1), "interaction", 1.0)]
LONG = "9" * 400

EVENTS = {
    "UTF-8 with a mark": Case(GOOD.encode("utf-8-sig"), [U, V]),
    "UTF-16": Case(GOOD.encode("utf-16"), [U, V]),
    "UTF-16 without a mark": Case(GOOD.encode("utf-16-le"), [U, V]),
    "Latin-1": Case(GOOD.replace("u,", "ü,").encode("latin-1"), [("ü", *U[1:]), V], notes=("not UTF-8",)),
    "line ends of Windows": Case(GOOD.replace("\n", "\r\n"), [U, V]),
    "line ends of old Macs": Case(GOOD.replace("\n", "\r"), [U, V]),
    "no last line end": Case(GOOD.rstrip(), [U, V]),
    "blank lines": Case(GOOD.replace("\n", "\n\n"), [U, V]),
    "semicolons": Case(GOOD.replace(",", ";"), [U, V]),
    "tabs": Case(GOOD.replace(",", "\t"), [U, V], name="table.tsv"),
    "bars": Case(GOOD.replace(",", "|"), [U, V], name="table.txt"),
    "two colons": Case(GOOD.replace(",", "::"), [U, V], name="table.dat"),
    "a spreadsheet's hint": Case("sep=;\n" + GOOD.replace(",", ";"), [U, V]),
    "gzip": Case(gzip.compress(GOOD.encode()), [U, V], name="table.csv.gz"),
    "gzip of JSON": Case(gzip.compress(lines({}).encode()), WITHOUT_TYPE[:1], name="table.json.gz"),
    "quoted header": Case(GOOD.replace("user_id", '"user_id"'), [U, V]),
    "names of other tools": Case(GOOD.replace("user_id,item_id,event_time", "USER_ID,Item ID,TIMESTAMP"), [U, V]),
    "typed names": Case(
        GOOD.replace(
            "user_id,item_id,event_time,event_type,value",
            "user_id:token,item_id:token,timestamp:float,event_type:token,value:float",
        ),
        [U, V],
    ),
    "row names of R": Case(HEADER + "1,u,a,1780000000,buy,1\n2,v,a,1780000001,buy,1\n", [U, V]),
    "an unquoted separator": Case(GOOD + "w,a,b,1780000002,buy,1\n", [U, V], {"6 fields where the header has 5": [4]}),
    "a short row": Case(GOOD + "w,a\n", [U, V], {"2 fields where the header has 5": [4]}),
    "separators behind": Case(GOOD.replace("buy,1\n", "buy,1,,\n"), [U, V]),
    "a NUL byte": Case(GOOD.replace("v,a,1780000001", "v\0,a,1780000001"), [U], {"bytes that are not text": [3]}),
    "half a surrogate pair": Case(
        GOOD.encode().replace(b"v,a", b"\xed\xa0\x80,a"), [U], {"bytes that are not text": [3]}
    ),
    "an open quote": Case(
        HEADER + '"u,a,1780000000,buy,1\n' + GOOD.removeprefix(HEADER), [U, V], {"a quote that is not closed": [2]}
    ),
    "an open quote and a separator": Case(
        HEADER + 'x,"a,b,1780000000,buy,1\n' + GOOD.removeprefix(HEADER), [U, V], {"a quote that is not closed": [2]}
    ),
    "newest first": Case(
        HEADER + "v,a,1780000001,buy,1\nu,a,1780000001,buy,1\nu,a,1780000000,view,1\nu,a,1780000000,buy,1\n",
        [U, ("u", "a", U[2], "view", 1.0), ("u", "a", V[2], "buy", 1.0), V],
        notes=("events are ordered by time, and equal times from the last row up",),
    ),
    "no value": Case(
        HEADER + "u,a,1780000000,buy,\nv,a,1780000001,buy,1\n",
        [U, V],
        notes=("1 without a value count with the value 1, also where rules have a `min_value`",),
    ),
    "newest days first": Case(
        "user_id,item_id,event_time,event_type\nu,a,20260529,buy\nu,a,20260528,view\nu,a,20260528,buy\n",
        [
            ("u", "a", DAY, "buy", 1.0),
            ("u", "a", DAY, "view", 1.0),
            ("u", "a", DAY + timedelta(days=1), "buy", 1.0),
        ],
        notes=("events of one day are in reverse order of their rows",),
    ),
    "types as floating-point numbers": Case(
        HEADER + "u,a,1780000000,1.0,1\nv,a,1780000001,,1\n",
        [(*U[:3], "1", 1.0), (*V[:3], "interaction", 1.0)],
        notes=("values of column event_type are written as floating-point numbers",),
    ),
    "baskets of floating-point numbers": Case(
        HEADER + 'u,"[12.0, 13.0]",1780000000,buy,1\nv,12.0,1780000001,buy,1\n',
        [("u", "12", *U[2:]), ("u", "13", *U[2:]), ("v", "12", *V[2:])],
        notes=("3 values of column item_id are written as floating-point numbers", "1 rows list several items"),
    ),
    "baskets of numbers with their types": Case(
        parquet(item_id=[[12.0, 13.0], [12.0]], event_type=["buy", "buy"]),
        [("u", "12", *U[2:]), ("u", "13", *U[2:]), ("v", "12", *V[2:])],
        notes=("3 values of column item_id are written as floating-point numbers",),
        name="events.parquet",
    ),
    "days": Case(
        "user_id,item_id,event_time\nu,a,20260528\n", [("u", "a", DAY, "interaction", 1.0)], notes=("whole days",)
    ),
    "times within a session": Case(
        "user_id,item_id,event_time,timeframe\nu,a,2026-05-28,3000\nu,b,2026-05-28,1000\nu,c,2026-05-28,NA\nu,d,2026-05-28,soon\n",
        [
            ("u", item, DAY + timedelta(seconds=seconds), "interaction", 1.0)
            for item, seconds in (("d", 0), ("c", 0), ("b", 1), ("a", 3))
        ],
        notes=("1 with an invalid offset_ms", "events are ordered by time"),
        options=ItemArguments(column=["timeframe=offset_ms"]).parsed(),
    ),
    "days since 1970": Case(
        "user_id,item_id,event_time\nu,a,20000.5\n",
        [("u", "a", datetime(1970, 1, 1, 5, 33, 20, 500_000, UTC), "interaction", 1.0)],
        notes=("1 times are before 1990",),
    ),
    "a counter": Case(
        "user_id,item_id,event_time\nu,a,1\nu,b,43831\n",
        [
            ("u", "a", datetime(1970, 1, 1, 0, 0, 1, 0, UTC), "interaction", 1.0),
            ("u", "b", datetime(1970, 1, 1, 12, 10, 31, 0, UTC), "interaction", 1.0),
        ],
        notes=("2 times are before 1990",),
    ),
    "MongoDB's types": Case(
        lines({"user_id": {"$numberLong": "7"}, "event_time": {"$date": {"$numberLong": "1780000000000"}}}),
        [("7", *WITHOUT_TYPE[0][1:])],
        name="e.json",
    ),
    "ignored columns": Case(
        HEADER.replace("event_type,value", "event,EVENT_VALUE") + "u,a,1780000000,buy,3\n",
        WITHOUT_TYPE[:1],
        notes=("event (--column event=event_type reads it), EVENT_VALUE (--column EVENT_VALUE=value reads it)",),
    ),
    "mapped columns": Case(
        HEADER.replace("event_type,value", "event,EVENT_VALUE") + "u,a,1780000000,buy,1\n",
        [U],
        options=ItemArguments(column=["event=event_type", "EVENT_VALUE=value"]).parsed(),
    ),
    "a skipped column": Case(GOOD, WITHOUT_TYPE, options=ItemArguments(skip=["event_type"]).parsed()),
    "equal rows": Case(GOOD + GOOD.removeprefix(HEADER), [U, V], notes=("2 exact duplicates",)),
    "an unprintable id": Case(HEADER + '"u\n",a,1780000000,buy,1\n"v\x07",a,1780000001,buy,1\n', [U], {"user_id": [3]}),
    "JSON numbers": Case(
        lines({"user_id": 7}, {"user_id": 7.0}),
        [("7", *WITHOUT_TYPE[0][1:])],
        name="e.jsonl",
        notes=(FLOATS, "1 exact duplicates"),
    ),
    "an array": Case(
        json.dumps([{"user_id": "u", "item_id": "a", "event_time": 1_780_000_000}], indent=1),
        WITHOUT_TYPE[:1],
        name="e.json",
    ),
    "an object with an array": Case(
        json.dumps({"events": [{"user_id": "u", "item_id": "a", "event_time": 1_780_000_000}]}),
        WITHOUT_TYPE[:1],
        name="e.json",
    ),
    "an object with an array, deeper": Case(
        json.dumps({"data": {"page": 1, "events": [{"user_id": "u", "item_id": "a", "event_time": 1_780_000_000}]}}),
        WITHOUT_TYPE[:1],
        name="e.json",
    ),
    "objects by key": Case(
        json.dumps(
            {
                "-Mx1": {"user_id": "u", "item_id": "a", "event_time": 1_780_000_000},
                "-Mx2": {"user_id": "v", "item_id": "a", "event_time": 1_780_000_001},
            }
        ),
        WITHOUT_TYPE,
        name="e.json",
    ),
    "one object of objects": Case(
        json.dumps({"user": {"user_id": "u"}, "item": {"item_id": "a"}, "when": {"event_time": 1_780_000_000}}),
        WITHOUT_TYPE[:1],
        name="e.json",
        options=ItemArguments(
            column=["user.user_id=user_id", "item.item_id=item_id", "when.event_time=event_time"]
        ).parsed(),
    ),
    "marks of direction": Case(GOOD.replace("u,a", "\u200fu\u200e,a"), [U, V]),
    "a basket": Case(
        lines({"item_id": ["a", "b"]}),
        [WITHOUT_TYPE[0], ("u", "b", *WITHOUT_TYPE[0][2:])],
        name="e.jsonl",
        notes=("each is an event",),
    ),
    "poison": Case(
        lines(
            {},
            {"user_id": "X"},
            '{"user_id": "\\ud800", "item_id": "a", "event_time": 1}',
            "[1]",
            '{"user_id":',
            {"event_time": float("nan")},
        ).replace('"X"', LONG),
        WITHOUT_TYPE[:1],
        {"bytes that are not text": [3], "no JSON object": [4], "no JSON": [5], "user_id": [2], "event_time": [6]},
        name="e.jsonl",
    ),
    "categorical ids": Case(parquet(user_id=pa.array(["u", "v"]).dictionary_encode()), WITHOUT_TYPE, name="e.parquet"),
    "decimal ids": Case(
        parquet(user_id=[Decimal("7.00"), Decimal("8.00")]),
        [("7", *WITHOUT_TYPE[0][1:]), ("8", *WITHOUT_TYPE[1][1:])],
        name="e.parquet",
        notes=(FLOATS,),
    ),
    "ids beside a missing one": Case(
        parquet(user_id=[7.0, None]), [("7", *WITHOUT_TYPE[0][1:])], {"user_id": [2]}, name="e.parquet", notes=(FLOATS,)
    ),
    "bytes as ids": Case(parquet(user_id=[b"u", b"\xff"]), WITHOUT_TYPE[:1], {"user_id": [2]}, name="e.parquet"),
    "a list of items": Case(parquet(item_id=[["a"], []]), WITHOUT_TYPE[:1], {"item_id": [2]}, name="e.parquet"),
    "times with a zone": Case(
        parquet(event_time=pa.array([AT, AT + timedelta(seconds=1)], pa.timestamp("ms", "+02:00"))),
        WITHOUT_TYPE,
        name="e.parquet",
    ),
    "times in nanoseconds": Case(
        parquet(
            event_time=pa.array(
                [AT.replace(tzinfo=None), AT.replace(tzinfo=None) + timedelta(seconds=1)], pa.timestamp("ns")
            )
        ),
        WITHOUT_TYPE,
        name="e",
    ),
    "dates": Case(
        parquet(event_time=[DAY.date(), DAY.date()]),
        [("u", "a", DAY, "interaction", 1.0), ("v", "a", DAY, "interaction", 1.0)],
        name="e.parquet",
        notes=("whole days",),
    ),
    "decimal times": Case(
        parquet(event_time=[Decimal(1_780_000_000), Decimal(1_780_000_001)]), WITHOUT_TYPE, name="e.parquet"
    ),
    "wide decimal times": Case(
        parquet(event_time=pa.array([1_780_000_000, 1_780_000_001], pa.decimal256(50, 0))),
        WITHOUT_TYPE,
        name="e.parquet",
    ),
    "a list of wide decimals": Case(
        parquet(event_type=pa.array([[Decimal(1)], [Decimal(2)]], pa.list_(pa.decimal256(50, 0)))),
        [("u", "a", AT, '["1"]', 1.0), ("v", "a", AT + timedelta(seconds=1), '["2"]', 1.0)],
        name="e.parquet",
    ),
    "durations as types": Case(
        parquet(event_type=pa.array([60, 61], pa.duration("s"))),
        [("u", "a", AT, "0:01:00", 1.0), ("v", "a", AT + timedelta(seconds=1), "0:01:01", 1.0)],
        name="e.parquet",
    ),
    "a report's title": Case(
        f"# exported by Shop, 2026\nVisits;;;;\n\n{GOOD.replace(',', ';')}x;a\n",
        [U, V],
        {"2 fields where the header has 5": [7]},
        notes=("3 lines before the header are skipped, such as # exported by Shop, 2026",),
    ),
    "a blank after each separator": Case(GOOD.replace(",", ", ").replace("buy", '"buy"'), [U, V]),
    "flags as values": Case(parquet(value=[True, True]), WITHOUT_TYPE, name="e.parquet"),
}


def check(case: Case, outcome: tuple[Any, Findings]) -> None:
    """Compare the rows and findings with the case's expectations."""
    rows, findings = outcome
    assert rows == case.rows
    assert {reason: group.rows for reason, group in findings.set_aside.items()} == case.aside
    sentences = [str(note) for note in findings.notes]
    assert [part for part in case.notes if not any(part in sentence for sentence in sentences)] == []


@pytest.mark.parametrize("name", EVENTS)
def test_events_are_read_alike_by_all_commands(name: str, tmp_path: Path) -> None:
    """For all encodings, separators, quotes and types, rows are read as expected or rejected by number."""
    check(EVENTS[name], found(EVENTS[name], events_of, tmp_path)[0])


def cell(text: str) -> str:
    """Return a table of one item with these categories."""
    doubled = text.replace('"', '""')
    return f'{ITEMS}p1,Lamp,"{doubled}"\n'


TWO = ("['A', 'B']", '["A", "B"]', "A; B", "A|B", "A | B", "{A,B}", "['A' 'B']", "('A', 'B')", '[["A"], ["B"]]')
CATEGORIES = {
    **{text: ["A", "B"] for text in TWO},
    "[{'id': 1, 'name': 'A'}, {'id': 2, 'name': 'B'}]": ["A", "B"],
    '[{"name": "A"}, {"name": "B"}]': ["A", "B"],
    "[\"Children's\", 'B']": ["Children's", "B"],
    "A, B": ["A, B"],
    "A > B": ["A > B"],
    "R&amp;B": ["R&B"],
    "R&amp;B; A": ["R&B", "A"],
    "(Live)": ["(Live)"],
    **{text: [] for text in ("", "NA", "-", "[]", "[nan]", "|", "(no genres listed)")},
}


@pytest.mark.parametrize("text", CATEGORIES)
def test_lists_are_read_as_tools_print_them(text: str, tmp_path: Path) -> None:
    """Lists of JSON, Python, numpy, Postgres, bars and semicolons are split; commas are only noted."""
    (rows, findings), _ = found(Case(cell(text), []), items_of, tmp_path)

    assert rows == [("p1", "Lamp", CATEGORIES[text])]
    assert any("--list 'categories=,'" in str(note) for note in findings.notes) == (text == "A, B")


P1, P2, P3 = ("p1", "Lamp", ["Light"]), ("p2", "Chair", ["Seat"]), ("p3", "Table", ["Wood"])
ROWS = f"{ITEMS}p1,Lamp,Light\n%sp3,Table,Wood\n"

TABLES = {
    "an unquoted comma": Case(ROWS % "p2,Table, oak,Seat\n", [P1, P3], {"4 fields where the header has 3": [3]}),
    "a stray quote": Case(ROWS % 'p2,"Classic" Jazz,Seat\n', [P1, ("p2", '"Classic" Jazz', ["Seat"]), P3]),
    "a quote inside": Case(ROWS % 'p2,Pipe 6" long,Seat\n', [P1, ("p2", 'Pipe 6" long', ["Seat"]), P3]),
    "doubled quotes": Case(ROWS % 'p2,"A ""B"" C",Seat\n', [P1, ("p2", 'A "B" C', ["Seat"]), P3]),
    "backslashes": Case(ROWS % 'p2,"A \\"B\\", C",Seat\n', [P1, ("p2", 'A "B", C', ["Seat"]), P3]),
    "a line end in a quote": Case(ROWS % 'p2,"Chair\nof oak",Seat\n', [P1, ("p2", "Chair of oak", ["Seat"]), P3]),
    "an open quote": Case(ROWS % 'p2,"Chair, oak,Seat\n', [P1, P3], {"a quote that is not closed": [3]}),
    "an open quote before quotes": Case(
        ROWS % 'p2,"Chair, oak,Seat\np4,"A, B",C\n',
        [P1, ("p4", "A, B", ["C"]), P3],
        {"a quote that is not closed": [3]},
    ),
    "one item in rows": Case(
        ITEMS + "p1,Lamp,Light\np1,,\np1,Other,\np2,,Seat\np2,Chair,\n",
        [P1, P2],
        notes=("3 rows are merged", "1 values of merged rows differ"),
    ),
    "float ids": Case(
        ROWS.replace("p1", "12.0").replace("p3", "13.0") % "",
        [("12", *P1[1:]), ("13", *P3[1:])],
        notes=("read as integers",),
    ),
    "categories as floating-point numbers": Case(
        ITEMS + "p1,Lamp,12.0\np2,Chair,\np3,Table,13.0\n",
        [("p1", "Lamp", ["12"]), ("p2", "Chair", []), ("p3", "Table", ["13"])],
        notes=("2 values of column categories are written as floating-point numbers",),
    ),
    "categories of which some are no numbers": Case(
        ITEMS + "p1,Lamp,2.0\np2,Chair,beta\n", [("p1", "Lamp", ["2.0"]), ("p2", "Chair", ["beta"])]
    ),
    "files appended with their headers": Case(ROWS % ITEMS, [P1, P3], {"the header again": [3]}),
    "an id that is the name of its column": Case(ROWS % "item_id,Chair,Seat\n", [P1, ("item_id", *P2[1:]), P3]),
    "no title": Case(ROWS % "p2,,Seat\n", [P1, ("p2", "p2", ["Seat"]), P3], notes=("1 without a title",)),
    "a missing id": Case(ROWS % ",Chair,Seat\n", [P1, P3], {"item_id": [3]}),
    "a long title": Case(
        ROWS % f"p2,{'x' * 1_100},Seat\n", [P1, ("p2", "x" * 1_024, ["Seat"]), P3], notes=("cut to 1024",)
    ),
    "a list separated by commas": Case(
        ROWS % 'p2,Chair,"A, B"\n',
        [P1, ("p2", "Chair", ["A", "B"]), P3],
        options=ItemArguments(lists=["categories=,"]).parsed(),
    ),
    "a blank after each comma": Case(
        'item_id, title, categories\np1, Lamp, "Light, Room"\np2, Chair, "Seat, Room"\n',
        [("p1", "Lamp", ["Light", "Room"]), ("p2", "Chair", ["Seat", "Room"])],
        options=ItemArguments(lists=["categories=,"]).parsed(),
    ),
    "HTML entities": Case(
        ROWS % "p2,Tom &amp; Jerry&#39;s &foo; A&B;,Toys &amp; Games;Caf&eacute;\n",
        [P1, ("p2", "Tom & Jerry's &foo; A&B;", ["Toys & Games", "Café"]), P3],
        notes=(
            "1 values of column title have HTML entities, which are decoded",
            "1 values of column categories have HTML entities",
        ),
    ),
    "HTML entities in a list": Case(
        '{"item_id": "p1", "title": "Lamp", "categories": ["Light", "A &lt; B"]}\n',
        [("p1", "Lamp", ["Light", "A < B"])],
        name="i.jsonl",
    ),
    "sequences": Case(
        "item_id:token\ttitle:token_seq\tclass:token_seq\n1\tToy Story\tComedy Drama\n",
        [("1", "Toy Story", ["Comedy", "Drama"])],
        options=ItemArguments(column=["class=categories"]).parsed(),
        name="x.item",
    ),
    "flags of genres": Case(
        "item_id,title,Action,Drama\n1,A,1,0\n2,B,1,1\n",
        [("1", "A", ["Action"]), ("2", "B", ["Action", "Drama"])],
        options=ItemArguments(column=["Action=categories", "Drama=categories"]).parsed(),
    ),
    "objects": Case(
        '{"item_id": "p1", "title": "Lamp", "categories": [{"name": "Light"}, null]}\n', [P1], name="i.jsonl"
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_items_are_read_alike_by_all_commands(name: str, tmp_path: Path) -> None:
    """A broken row costs only that row, and rows of the same item are merged."""
    check(TABLES[name], found(TABLES[name], items_of, tmp_path)[0])


def states_of(content: str, tmp_path: Path, name: str = "table.csv", **options: Any) -> tuple[dict[str, Any], Findings]:
    """Import items, and return their states by id."""
    sent: list[Any] = []
    path = written(tmp_path, Case(content, [], name=name))
    run = ImportRun(
        path=path,
        options=ItemArguments(**options).parsed(),
        send=sent.extend,
        progress_file=tmp_path / "p.json",
        scratch=tmp_path / "s",
    )
    _, findings = import_items(run, tmp_path / "delivered.json", ItemTopic().catalogue)
    return {
        name: state for name, state in (decode_item(key, value) for key, value, _ in sent) if state is not None
    }, findings


@pytest.mark.parametrize(
    ("column", "cells", "shown", "unread"),
    [
        ("available", ("yes", "", "NA", "InStock", "17", "2.5", "no", "0", "-3", "sold_out", "vielleicht"), 6, 1),
        ("published_ms", ("", "0", "0000-00-00 00:00:00", "1950-12-31", "-600000000", "bald", "9999-12-31"), 5, 1),
        ("expires_ms", ("", "9999-12-31", "2150-01-01T00:00:00Z", "0001-01-01", "1899-12-30", "46022", "1995"), 5, 2),
        ("expires_ms", ("28/12/2099", "05/06/2099", "05/06/1999", "31.12.1999"), 2, 0),
        ("expires_ms", ("2099-12-31", "05/06/2099"), 1, 1),
    ],
    ids=["available", "published", "expires", "the day first", "the day or the month first"],
)
def test_an_item_of_unclear_availability_is_not_shown(
    column: str, cells: Sequence[str], shown: int, unread: int, tmp_path: Path
) -> None:
    """The note names the column, what to write, and an example; the words of tools for no date count as none."""
    states, findings = states_of(
        "\n".join([f"item_id,{column}", *map("i{0[0]},{0[1]}".format, enumerate(cells))]), tmp_path
    )
    layout = LiveItems()
    layout.apply([*states.items()])

    is_shown = [bool(layout.layout.columns.available[layout.layout.index(f"i{at}")]) for at in range(len(cells))]
    assert is_shown == [at < shown for at in range(len(cells))]
    assert findings.num_unread.get(column, 0) == unread
    assert any(f"column {column}: write " in str(note) for note in findings.notes) == bool(unread)


def test_commands_that_hide_no_items_say_so(tmp_path: Path) -> None:
    """Training and `add-items` do not read the columns, so hidden items are shown until they are imported."""
    noted = {}
    for header in ("item_id,expires_ms,Available", "item_id,title,colour"):
        table = ItemTable(open_table(written(tmp_path, Case(f"{header}\na,2099-01-01,no\n", [])), "items", PLAIN))
        table.read_catalogue()
        noted[header] = [str(note) for note in table.findings.notes if "live catalogue" in str(note)]

    (note,), none = noted.values()
    assert note == (
        "items: Available and expires_ms hide items only in the live catalogue: `tailrace import items` reads them"
    )
    assert none == []


def test_a_time_that_is_no_text_is_not_read() -> None:
    """Bytes in no encoding are missing, like any other unreadable time."""
    assert times(pl.Series([b"\xff", b"2026-01-01"])).is_null().to_list() == [True, False]


def test_a_bad_attribute_costs_the_attribute(tmp_path: Path) -> None:
    """Missing prices, long texts and reserved names are counted, and the items are kept."""
    rows = f"p1,19.9,3,short,yes\np2,—,4,short,perhaps\np3,$40,1,{'long ' * 80},no\np4,dear,1,,out_of_stock\n"
    states, findings = states_of(f"item_id,price,popularity,description,available\n{rows}", tmp_path, number=["price"])

    assert {name: state.attributes.get("price") for name, state in states.items()} == {
        "p1": 19.9,
        "p2": None,
        "p3": 40.0,
        "p4": None,
    }
    assert "description" not in states["p3"].attributes
    assert findings.num_unread == {"price": 1, "description": 1, "available": 1}
    assert sum("column popularity is skipped" in str(note) for note in findings.notes) == 1


def test_numbers_of_json_are_numbers_also_if_some_are_whole(tmp_path: Path) -> None:
    """A price of 10.0 is 10 in the JSON of most tools; integers that a float cannot hold stay as they are written."""
    rows = '{"item_id": 9007199254740993, "price": 10}\n{"item_id": 12.0, "price": 9.5}\n'
    states, _ = states_of(rows, tmp_path, "items.jsonl")

    assert {name: state.attributes["price"] for name, state in states.items()} == {"9007199254740993": 10, "12": 9.5}


def test_a_list_of_an_attribute_is_split_by_its_option(tmp_path: Path) -> None:
    """`--list` applies to attributes as it does to categories."""
    states, _ = states_of('item_id,tags\np1,"red, blue"\np2,green\n', tmp_path, lists=["tags=,"])

    assert {name: state.attributes["tags"] for name, state in states.items()} == {"p1": ("red", "blue"), "p2": "green"}


REFUSED = {
    "many columns": (
        f"{','.join(f'c{number}' for number in range(1_000))}\n{'a,' * 999}a\n",
        {},
        "c18, c19, ... in table.csv; --column",
    ),
    "options for all that is missing": (
        "visitorid,ts,product\nu,1780000000,a\n",
        {},
        "--column visitorid=user_id --column product=item_id --column ts=event_time",
    ),
    "single quotes": (
        GOOD.replace("user_id,item_id", "'user_id','item_id'").replace(
            "event_time,event_type,value", "'event_time','event_type','value'"
        ),
        {},
        "single quotes",
    ),
    "a nested name": (
        "user_id,properties.product_id,event_time\nu,a,1780000000\n",
        {},
        "--column properties.product_id=item_id",
    ),
    "ORC": ("ORC\nu,a\n", {}, "is an ORC file"),
    "7z": ("7z\xbc\xaf\x27\x1c".encode("latin-1"), {}, "is a 7z archive"),
    "tar": ("events.csv".ljust(257, "\0") + "ustar", {}, "is a tar archive"),
    "a picture": (b"\x89PNG\r\n\x1a\n", {}, "is a picture"),
    "a program": ("\x7fELF\x02\x01\x01\n", {}, "is not text"),
    "a web page": ("\n<!DOCTYPE html><table><tr><td>user_id</td></tr></table>", {}, "is HTML or XML"),
    "a first line of data": (
        "1::1193::5::978300760\n1::661::3::978302109\n",
        {},
        "--header events=user_id,item_id,value,event_time",
    ),
    "a header of another length": (
        "1,2,1780000000\n",
        {"header": ["events=user_id,item_id"]},
        "--header: 2 names for 3 fields",
    ),
    "an unknown column": (GOOD, {"column": ["sku=item_id"]}, "--column sku=item_id: no column sku"),
    "a turned option": (GOOD.replace("item_id", "sku"), {"column": ["item_id=sku"]}, "--column sku=item_id"),
    "an unknown field": (GOOD, {"column": ["value=price"]}, "price is not a field of events"),
    "an unknown column to skip": (GOOD, {"skip": ["colour"]}, "--skip colour: no column colour"),
    "two columns of one name": (
        GOOD.replace("event_type", "User_ID").replace("user_id", "USER_ID"),
        {},
        "--skip 'User_ID'",
    ),
    "fractions as ids": (
        "user_id,item_id,event_time\n1.5,a,1780000000\n2.0,a,1780000000\n",
        {},
        "floating-point numbers, such as 1.5",
    ),
    "days of a spreadsheet": (
        "user_id,item_id,event_time\nu,a,43831.5\nu,b,NA\nu,b,46000\n",
        {},
        "column event_time: day numbers of a spreadsheet, such as 43831.5",
    ),
    "no row that can be used": (
        "user_id,item_id,event_time\nu,a,soon\n",
        {},
        "not one row can be used, such as 'soon'",
    ),
    "no type that can be used": (
        'user_id,item_id,event_time,event_type\nu,a,1780000000,"a\nb"\n',
        {},
        "column event_type: not one row can be used",
    ),
    "ids that are too long": (
        f"user_id,item_id,event_time\n{'u' * 257},a,1780000000\n",
        {},
        "ids have at most 256 characters",
    ),
    "no rows": (HEADER, {}, "has no rows"),
    "nothing": ("", {}, "has no rows"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_table_that_is_refused_names_the_option_that_reads_it(name: str, tmp_path: Path) -> None:
    """Both commands reject the table with the same message before sending rows."""
    content, options, words = REFUSED[name]
    path, sent = written(tmp_path, Case(content, [])), []
    (tmp_path / "items.csv").write_text("item_id\na\n")
    for read in (
        lambda: open_tables(
            IngestSources(path, tmp_path / "items.csv", (), tables=ItemArguments(**options).parsed()), tmp_path
        )[1].read(),  # type: ignore[union-attr]
        lambda: import_events(
            ImportRun(
                path=path,
                options=ItemArguments(**options).parsed(),
                send=sent.append,
                progress_file=tmp_path / "p",
                scratch=tmp_path / "s",
            ),
            None,
            NOW_MS,
        ),
    ):
        with pytest.raises((DataError, ConfigError)) as refused:
            read()
        assert words in str(refused.value)
    assert sent == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"user_id": "u", "x": ' + "[" * 2_000 + "]" * 2_000 + "}", "row 1: nested too deep"),
        ('{"user_id": "u", "x": "\\ud800"}', "row 1: bytes that are not text"),
        ('["a", "b"]', "row 1: no JSON object"),
        ("[]", "no rows"),
    ],
    ids=["nested", "half a character", "texts", "empty"],
)
def test_json_without_a_row_is_refused_by_its_first_reason(content: str, words: str, tmp_path: Path) -> None:
    """A file without one readable object says why, not that its columns are missing."""
    (tmp_path / "events.jsonl").write_text(content)
    with pytest.raises(DataError, match=words):
        open_table(tmp_path / "events.jsonl", "events", TableOptions())


def test_a_note_on_a_row_is_one_line(tmp_path: Path) -> None:
    """Lists and line breaks of a rejected row are shown on one line, as they are in the file."""
    path = tmp_path / "e.parquet"
    path.write_bytes(parquet(user_id=["u", None], item_id=[["a"], ["b", "c"]], event_type=["buy", "add\nto cart"]))

    table = EventTable(open_table(path, "events", PLAIN))
    table.read()

    (sentence,) = table.findings.describe_set_aside()
    assert "item_id=['b', 'c'], " in sentence
    assert "event_type=add to cart" in sentence


def test_a_skipped_column_is_no_attribute(tmp_path: Path) -> None:
    """A column whose name is not valid for an attribute is not listed among the attributes."""
    _, findings = states_of(f"item_id,price,{'n' * 200}\np1,2,3\n", tmp_path)

    assert any(str(note).endswith("models do not learn from: price") for note in findings.notes)


def test_a_column_without_a_name_is_no_attribute(tmp_path: Path) -> None:
    """Tools name the column of row numbers with an empty text; no item can have an attribute of that name."""
    (tmp_path / "items").write_text(json.dumps({"": "0", "item_id": "p1", "price": "2"}))

    table = ItemTable(open_table(tmp_path / "items", "items", TableOptions()), TableOptions())
    changes = dict(item_changes(table.read()))

    assert ItemState(item_id="p1").patched(changes["p1"]).attributes == {"price": "2"}
    assert any("column '' is skipped" in str(note) for note in table.findings.notes)


@pytest.mark.parametrize(
    "names",
    [
        {"a": "popularity"},
        {"a": "n" * 65},
        {"a": "x\x07"},
        {"a": "colour", "b": "colour"},
        {"a": "price"},
    ],
)
def test_an_attribute_that_no_item_can_have_is_refused(names: dict[str, str], tmp_path: Path) -> None:
    """A reserved, long or unprintable name, and a name of two columns, would cost every item or a column."""
    (tmp_path / "items.csv").write_text("item_id,a,b,price\np1,1,2,3\n")
    options = TableOptions(names=names)

    with pytest.raises(ConfigError, match="--column"):
        ItemTable(open_table(tmp_path / "items.csv", "items", options), options)


def test_an_address_is_refused_as_one() -> None:
    """A URL, which a path has one slash of, is not reported as missing, and an import says so before it connects."""
    with pytest.raises(DataError, match=r"events.csv is at an address \(https:\)"):
        open_table(Path("https://example.com/events.csv"), "events", TableOptions())
    with pytest.raises(DataError, match=r"at an address \(ftp:\)"):
        local_file("ftp://example.com/events.csv", None, Path())


def test_an_object_that_cannot_be_read_names_the_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of an import from an object store has the address, the store's answer and the fix."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")

    with pytest.raises(EnvironmentFault, match=r"items.csv cannot be read \(.*\); correct .* AWS_ACCESS_KEY_ID"):
        local_file("s3://shop/items.csv", None, tmp_path)


def test_a_folder_is_refused_as_one(tmp_path: Path) -> None:
    """Clusters write a table as a folder of files."""
    with pytest.raises(DataError, match="is a folder"):
        open_table(tmp_path, "events", TableOptions())


@pytest.mark.parametrize("write", [pl.DataFrame.write_parquet, pl.DataFrame.write_ipc, pl.DataFrame.write_ipc_stream])
def test_a_compressed_typed_table_is_read(write: Callable[[pl.DataFrame, Path], object], tmp_path: Path) -> None:
    """Parquet and Arrow are recognised within gzip under any name; a truncated file is refused."""
    rows = {"user_id": ["u", "v"], "item_id": ["a", "a"], "event_time": [1780000000, 1780000001]}
    write(pl.DataFrame(rows), tmp_path / "plain")
    packed = gzip.compress((tmp_path / "plain").read_bytes())
    for name in ("events.parquet.gz", "events"):
        (tmp_path / name).write_bytes(packed)
        assert EventTable(open_table(tmp_path / name, "events", TableOptions())).read()["user_id"].to_list() == [
            "u",
            "v",
        ]
    (tmp_path / "events").write_bytes(packed[:-12])
    with pytest.raises(DataError):
        EventTable(open_table(tmp_path / "events", "events", TableOptions())).read()


def test_an_item_id_is_that_of_the_items(tmp_path: Path) -> None:
    """Events match items whose ids have fractions; if no id matches, the error shows ids of both tables."""
    (tmp_path / "items.csv").write_text("item_id\n2.0\n3.1\nusb\n")
    for item, expected in (("2.0", ["2.0"]), ("cable", None)):
        path = written(tmp_path, Case(f"user_id,item_id,event_time\nu,{item},1\n", []))
        items, events = open_tables(IngestSources(path, tmp_path / "items.csv", ()), tmp_path)
        assert events is not None
        known = items.read_catalogue()["item_id"]
        if expected is not None:
            assert events.read(known)["item_id"].to_list() == expected
            continue
        with pytest.raises(DataError, match=r"cable.*ids such as '2\.0', '3\.1'"):
            events.read(known)


def test_a_file_that_is_replaced_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of two files would be one table, and items of a half-written file would count as missing.

    Only events may be appended meanwhile.
    """
    monkeypatch.setattr("pipelines.tables.files._CACHED_BYTES", 0)
    path, new = tmp_path / "t.csv", tmp_path / "new.csv"
    path.write_text("item_id,user_id,event_time\na,u,2026-01-01\nb,u,2026-01-01\n")
    grown, replaced, appended = (open_table(path, kind, PLAIN) for kind in ("items", "events", "events"))
    with path.open("a") as out:
        out.write("c,u,2026-01-01\n")
    num_events = sum(batch.frame.height for batch in appended.batches())
    with pytest.raises(DataError, match=r"t\.csv changed while it was read; import it again"):
        list(grown.batches())
    new.write_bytes(path.read_bytes() + b"d,u,2026-01-01\n")
    new.rename(path)
    with pytest.raises(DataError, match="changed while it was read"):
        list(replaced.batches())

    assert num_events == 3
