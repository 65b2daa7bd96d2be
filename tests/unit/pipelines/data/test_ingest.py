"""Ingest reads every kind of table and the live log into a single table of events."""

import hashlib
import json
import zipfile
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import polars as pl
import pytest

from pipelines.data import sources
from pipelines.data.ingest import IngestSources, describe_found, describe_future, ingest, key, live_log_files, set_aside
from services.contracts.event_roles import parse_event_roles
from services.errors import TailraceError
from tests.support.training.synthetic import raw_events, raw_items

EVENT_COLUMNS = {"user_id": pl.String, "item_id": pl.String, "event_type": pl.String, "value": pl.Float64}


def own_tables(
    folder: Path, events: pl.DataFrame | None = None, items: pl.DataFrame | None = None
) -> tuple[Path, Path]:
    """Write events as CSV and items as JSON Lines; by default twelve events of three users on five items."""
    (raw_events(3, 5, 4) if events is None else events).write_csv(folder / "events.csv")
    (raw_items(5) if items is None else items).write_ndjson(folder / "items.jsonl")
    return folder / "events.csv", folder / "items.jsonl"


def live_file(folder: Path, name: str, rows: list[tuple[str, str, str, int]]) -> None:
    """Write a file of the offline log like the stream worker."""
    target = folder / "interactions" / name
    target.parent.mkdir(parents=True, exist_ok=True)
    frame = pl.DataFrame(rows, schema=["event_id", "user_id", "item_id", "event_time_ms"], orient="row")
    position = {
        "topic_id": pl.lit(target.parent.name),
        "partition": pl.lit(0, pl.Int32),
        "offset": pl.int_range(pl.len()),
    }
    frame.with_columns(event_type=pl.lit("click"), value=pl.lit(1.0), **position).write_parquet(target)


def run(source: IngestSources, folder: Path) -> tuple[pl.DataFrame, dict[str, object]]:
    """Ingest; return the events and the summary."""
    out = folder / "out"
    out.mkdir()
    ingest(source, folder / "cache", out)
    return pl.read_parquet(out / "events.parquet"), json.loads((out / "ingest.json").read_text())


def test_contract_of_the_events_table(tmp_path: Path) -> None:
    """The table has the columns of the features stage, default type and value, and strictly rising times per user."""
    events, summary = run(IngestSources(*own_tables(tmp_path), ()), tmp_path)

    roles = {"role": pl.String, "weight": pl.Float32, "count": pl.Float32}
    assert dict(events.schema) == {**EVENT_COLUMNS, **roles, "event_time": pl.Datetime("us", "UTC")}
    gaps = events.select(pl.col("event_time").diff().over("user_id"))["event_time"].drop_nulls()
    assert gaps.dt.total_microseconds().min() > 0
    assert events["event_time"].is_sorted()
    assert summary["num_events"] == 12
    assert events.select("event_type", "value").unique().rows() == [("interaction", 1.0)]


def test_live_log_joins_the_history_and_repeated_events_count_once(tmp_path: Path) -> None:
    """Live clicks follow the user's recorded past; a retry with the same event id counts once."""
    clicks = [("e1", "u000", "i01", 1_800_000_000_000), ("e2", "new", "i02", 1_800_000_000_001)]
    live_file(tmp_path / "log", "p0/1.parquet", clicks[:1])
    live_file(tmp_path / "log", "p0/2.parquet", clicks)

    events, summary = run(IngestSources(*own_tables(tmp_path), live_log_files(tmp_path / "log")), tmp_path)

    assert events.tail(2)["user_id"].to_list() == ["u000", "new"]
    assert (summary["num_live_events"], summary["num_events"]) == (2, 14)


def test_a_tenant_is_trained_on_its_own_events(tmp_path: Path) -> None:
    """Of the live log a run reads one tenant's users, under the ids that its callers know; each has its own key."""
    rows = [
        (f"e{index}", user_id, "i01", 1_800_000_000_000 + index) for index, user_id in enumerate(["u", "acme\x1fu"])
    ]
    live_file(tmp_path / "log", "p0/1.parquet", [*rows, ("e9", "bolt\x1fv", "i02", 1_800_000_000_009)])
    tables = own_tables(tmp_path)
    by_tenant, keys = {}, set()
    for tenant in ("", "acme", "bolt"):
        source = IngestSources(*tables, live_log_files(tmp_path / "log"), tenant=tenant)
        (folder := tmp_path / f"of {tenant}").mkdir()
        events, _ = run(source, folder)
        keys.add(key(source))
        by_tenant[tenant] = events.tail(len(events) - 12).select("user_id", "item_id").rows()

    assert by_tenant == {"": [("u", "i01")], "acme": [("u", "i01")], "bolt": [("v", "i02")]}
    assert len(keys) == 3


def test_a_doubled_export_is_the_single_one(tmp_path: Path) -> None:
    """Duplicated rows, in any order, change no output; the run reports the number of dropped rows."""
    bad = {"user_id": ["u000", "u001"], "item_id": ["gone", "i01"], "event_time": [1_700_000_000, -1]}
    single = pl.concat([raw_events(6, 5, 5), pl.DataFrame(bad)])
    tables = {"single": single, "behind": pl.concat([single, single]), "by-row": single[sorted([*range(32)] * 2)]}
    results = {}
    for name, table in tables.items():
        folder = tmp_path / name
        folder.mkdir()
        items = raw_items(5) if name == "single" else pl.concat([raw_items(5), raw_items(5)])
        _, summary = run(IngestSources(*own_tables(folder, table, items), ()), folder)
        notes, num_dropped = summary.pop("notes"), summary.pop("num_duplicates")
        outputs = sorted((folder / "out").glob("*.parquet"))
        tables = {path.name: pl.read_parquet(path).drop("row", strict=False).rows() for path in outputs}
        rejected = summary.pop("rejected")
        results[name] = (
            summary,
            tables,
            {reason: rejection["num_rows"] for reason, rejection in rejected["events"].items()},
        )  # type: ignore[index]
        assert num_dropped == (0 if name == "single" else 32)
        assert [text for note in notes if "duplicates" in (text := note["what"].partition(" (")[0])] == (  # type: ignore[attr-defined]
            [] if name == "single" else ["32 exact duplicates", "5 exact duplicates are dropped"]
        )

    assert results["single"] == results["behind"] == results["by-row"]
    assert results["single"][0]["num_recorded_rows"] == 32
    assert "events: 32 exact duplicates (same user, item, time," in describe_found(tmp_path / "behind" / "out")[1]


@pytest.mark.parametrize("is_removed", [False, True], ids=["damaged", "removed"])
def test_an_unreadable_file_of_the_live_log_is_named_and_left_out(is_removed: bool, tmp_path: Path) -> None:
    """The run uses all other files, and includes the file again once it is repaired."""
    for number, name in enumerate(("p0/1.parquet", "p0/2.parquet")):
        live_file(tmp_path / "log", name, [(f"e{number}", "u000", f"i0{number}", 1_800_000_000_000)])
    bad = tmp_path / "log/interactions/p0/1.parquet"
    right, whole = bad.read_bytes(), IngestSources(*own_tables(tmp_path), live_log_files(tmp_path / "log"))
    key_before = key(whole)
    bad.write_bytes(right[:-30])
    if is_removed:
        bad.unlink()

    _, summary = run(whole, tmp_path)

    assert summary["num_live_events"] == 1
    assert f"live log: 1 files cannot be read and are skipped, such as {bad}" in describe_found(tmp_path / "out")
    assert key(whole) != key_before
    bad.write_bytes(right)
    assert key(whole) == key_before


@pytest.mark.parametrize("event_ids", [False, True])
def test_an_event_of_the_table_and_the_live_log_counts_once(tmp_path: Path, event_ids: bool) -> None:
    """Recorded events match the log's by user, item, type and time, or by event id if times are coarser."""
    clicks = [("e1", "u000", "i01", 1_800_000_000_123), ("e2", "u000", "i02", 1_800_000_000_456)]
    live_file(tmp_path / "log", "p0/1.parquet", clicks)
    events, items = own_tables(tmp_path)
    recorded = pl.read_csv(events, infer_schema=False).with_columns(event_type=pl.lit("view"), event_id=pl.lit(""))
    export = [(user, item, f"{ms // 1_000 if event_ids else ms}", "click", name) for name, user, item, ms in clicks]
    table = pl.concat([recorded, pl.DataFrame(export, recorded.columns, orient="row")])
    (table if event_ids else table.drop("event_id")).write_csv(events)

    ingested, summary = run(IngestSources(events, items, live_log_files(tmp_path / "log")), tmp_path)

    assert (summary["num_events"], summary["num_live_events"]) == (14, 2)
    assert ingested.tail(2)["item_id"].to_list() == ["i01", "i02"]
    assert "events: 2 are also in the live log and count once, in their order of arrival" in describe_found(
        tmp_path / "out"
    )


def test_types_that_differ_in_case_alone_are_pointed_out(tmp_path: Path) -> None:
    """Types that differ only in case are reported with their counts, roles and a fix."""
    events = raw_events(3, 5, 4).with_columns(event_type=pl.Series(["Buy"] + ["buy"] * 10 + ["Dislike"]))
    run(IngestSources(*own_tables(tmp_path, events), ()), tmp_path)

    alike = [sentence for sentence in describe_found(tmp_path / "out") if "differ only in case" in sentence]

    assert [sentence.partition(" differ")[0] for sentence in alike] == [
        "events: types 'Buy' (1 positive) and 'buy' (10 positive)",
        "events: types 'Dislike' (1 positive) and 'dislike' (0 negative)",
    ]
    assert alike[0].endswith("write one of them in the table, or give each a rule in the events file")


def test_what_reading_changed_is_in_the_summary(tmp_path: Path) -> None:
    """Ids written as floating-point numbers are matched to the items, and the run reports them."""
    number = pl.col("item_id").str.slice(1).cast(pl.Int64)
    events, items = raw_events(3, 5, 4).with_columns(number.cast(pl.Float64)), raw_items(5).with_columns(number)

    ingested, _ = run(IngestSources(*own_tables(tmp_path, events, items), ()), tmp_path)

    assert ingested.height == 12
    assert any("of column item_id are written as floating-point" in line for line in describe_found(tmp_path / "out"))


def test_events_in_the_future_are_named_with_the_latest(tmp_path: Path) -> None:
    """Events more than a day in the future are ingested but reported with an example."""
    events, _ = tables = own_tables(tmp_path)
    with events.open("a") as rows:
        rows.write("u000,i01,2090-01-01\nu001,i02,2089-12-30\n")
    run(IngestSources(*tables, ()), tmp_path)

    (sentence,) = describe_future(tmp_path / "out", datetime(2089, 12, 29, 12, tzinfo=UTC))

    assert sentence.startswith("events: 1 have an event_time in the future, such as user_id=u000, item_id=i01, 2090")
    assert describe_future(tmp_path / "out", datetime(2089, 12, 31, 12, tzinfo=UTC)) == []


def test_roles_are_told_and_decide_what_is_learned_from(tmp_path: Path) -> None:
    """Ratings become labels or dislikes by value, impressions are ignored, and the run reports the roles."""
    rows = [("u", f"i{n:02d}", 1_700_000_000 + 60 * n, "rating", n) for n in range(10)]
    rows.append(("u", "i01", 1_700_000_700, "impression", 1))
    columns = ["user_id", "item_id", "event_time", "event_type", "value"]
    pl.DataFrame(rows, schema=columns, orient="row").write_parquet(tmp_path / "events.parquet")
    raw_items(10).write_ndjson(tmp_path / "items.jsonl")
    roles = parse_event_roles("[types.rating]\nmin_value = 4\nbelow = 'negative'")
    source = IngestSources(tmp_path / "events.parquet", tmp_path / "items.jsonl", ())

    events, _ = run(replace(source, roles=roles), tmp_path)

    assert events["item_id"].to_list() == [f"i{n:02d}" for n in range(4, 10)]
    assert describe_found(tmp_path / "out") == [
        "events of type impression: 1 ignored",
        "events of type rating: 4 negative, 6 positive (4 and up are positive, lower ones negative)",
        "0.0% of labels repeat an item of the user's history",
    ]
    assert pl.read_parquet(tmp_path / "out" / "arrivals.parquet").height == 10
    assert key(source) != key(replace(source, roles=roles))


def test_live_event_of_an_unknown_item_is_set_aside(tmp_path: Path) -> None:
    """Live events of unknown items are counted with a sample."""
    live_file(tmp_path / "log", "1.parquet", [("e1", "u000", "gone", 1_800_000_000_000), ("e2", "u000", "i01", 1)])

    _, summary = run(IngestSources(*own_tables(tmp_path), live_log_files(tmp_path / "log")), tmp_path)

    rejected = summary["rejected"]["live"]["item_id not in items"]  # type: ignore[index]
    assert rejected["num_rows"] == 1
    assert rejected["samples"][0]["item_id"] == "gone"
    (sentence,) = set_aside(tmp_path / "out")
    assert sentence.startswith("live: 1 set aside (item_id not in items), such as user_id=u000, item_id=gone")


@pytest.mark.parametrize(
    ("events", "items", "words"),
    [
        (raw_events(3, 5, 3), raw_items(5), "of 9 positive events that can be used, no user has more than 3; 4 of one"),
        (raw_events(3, 1, 4), raw_items(1), "1 items that can be used are too few for a choice; give at least 2"),
        (
            raw_events(3, 5, 4),
            raw_items(5).with_columns(pl.col("item_id") + ".0"),
            r"column item_id: not one row can be used, such as 'i.*; the items have ids such as 'i00\.0'",
        ),
        (
            raw_events(3, 5, 4).with_columns(event_type=pl.lit("impression")),
            raw_items(5),
            r"of 0 positive events .*; events of type impression: 12 ignored",
        ),
    ],
    ids=["too few events", "one item", "other ids", "no label"],
)
def test_too_little_data_is_refused_with_what_is_needed(
    tmp_path: Path, events: pl.DataFrame, items: pl.DataFrame, words: str
) -> None:
    """The error, raised before training, names the missing data, an example of differing ids, and ignored types."""
    with pytest.raises(TailraceError, match=words):
        run(IngestSources(*own_tables(tmp_path, events, items), ()), tmp_path)


def test_key_follows_the_content_of_files(tmp_path: Path) -> None:
    """Equal bytes at another path give the same key; an additional live event changes it."""
    events, items = own_tables(tmp_path)
    moved = tmp_path / "moved.csv"
    moved.write_bytes(events.read_bytes())
    live_file(tmp_path / "log", "1.parquet", [("e1", "u000", "i01", 1_800_000_000_000)])

    assert key(IngestSources(events, items, ())) == key(IngestSources(moved, items, ()))
    assert key(IngestSources(events, items, ())) != key(IngestSources(events, items, live_log_files(tmp_path / "log")))


def test_cached_wheel_is_used_without_a_download_and_read_in_file_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cached wheel with the right hash avoids the download; titles include the year, genres become categories."""
    wheel = tmp_path / sources.WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        folder = "recbole/dataset_example/ml-100k"
        archive.writestr(
            f"{folder}/ml-100k.inter",
            "user_id:token\titem_id:token\trating:float\ttimestamp:float\n7\t2\t3\t9\n7\t1\t4\t9\n",
        )
        archive.writestr(
            f"{folder}/ml-100k.item",
            "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
            '1\tToy "Story\tx\tComedy Film-Noir\n2\tGoldenEye\t1995\t\n',
        )
    monkeypatch.setattr(sources, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())

    cached = sources.fetch_wheel(tmp_path)

    assert sources.movielens_events(cached)["item_id"].to_list() == ["2", "1"]
    items = sources.movielens_items(cached)
    assert items["title"].to_list() == ['Toy "Story', "GoldenEye (1995)"]
    assert items["categories"].to_list() == [["Comedy", "Film-Noir"], []]
