"""Training/serving skew through the pipeline's own tables. Run: pytest tests/unit/pipelines/features/test_skew.py."""

import random
from dataclasses import replace
from pathlib import Path

import polars as pl

from pipelines.data.ingest import IngestSources, ingest, live_log_files
from pipelines.features.tables import build_tables, latest_histories
from pipelines.runner.stage import silent
from services.contracts.event_roles import parse_event_roles
from services.contracts.events import Interaction
from services.contracts.features import history_digest
from services.features.schema import LogPosition, UserHistory
from services.stream.aggregate import apply, history_limits
from services.stream.decode import LoggedInteraction
from services.stream.log.offline_log import OfflineLog

NUM_IMPRESSIONS, NUM_USERS, MAX_ITEMS = 10_000, 60, 40
NOW_MS = 1_800_000_000_000
ROLES = parse_event_roles("[types.view]\nrole = 'weak'\n[types.rating]\nmin_value = 4\nbelow = 'negative'")


def build(folder: Path, source: IngestSources) -> Path:
    """Run the stages ingest and features."""
    folder.mkdir()
    ingest(source, folder, folder)
    build_tables(folder, MAX_ITEMS, folder, silent, ROLES)
    return folder


def recorded(folder: Path) -> tuple[Path, Path]:
    """Write tables of past events of most users."""
    draw = random.Random(1)
    kinds = ("click", "click", "rating", "dislike", "impression")
    rows = [
        (f"u{n % 50}", f"i{draw.randrange(40)}", NOW_MS // 1_000 - 5_000 + n // 3, draw.choice(kinds), n % 6)
        for n in range(600)
    ]
    columns = ["user_id", "item_id", "event_time", "event_type", "value"]
    pl.DataFrame(rows, schema=columns, orient="row").write_csv(folder / "events.csv")
    items = [f"i{number}" for number in range(40)]
    pl.DataFrame({"item_id": items, "title": items}).write_ndjson(folder / "items.jsonl")
    return folder / "events.csv", folder / "items.jsonl"


def clicks() -> list[LoggedInteraction]:
    """Return events with late and equal times, all roles, repeated ids, unknown items, and a recreated topic."""
    draw = random.Random(2)
    events: list[LoggedInteraction] = []
    for number in range(NUM_IMPRESSIONS):
        user = draw.randrange(NUM_USERS)
        age_ms = draw.choice((0, 0, 1, 5_000, 3_600_000, 86_400_000))
        again = events and draw.random() < 0.05
        interaction = (
            draw.choice(events[-3_000:]).interaction
            if again
            else Interaction(
                event_id=f"e{number}",
                user_id=f"u{user}",
                item_id=f"i{draw.randrange(44)}",
                event_type=draw.choice(("click", "click", "view", "rating", "dislike", "impression")),
                value=draw.randrange(1, 6),
                event_time_ms=NOW_MS + number // 4 - age_ms,
            )
        )
        topic_id, offset = ("zz-first", number) if number < 6_000 else ("aa-second", number - 6_000)
        partition = int(interaction.user_id[1:]) % 2
        events.append(LoggedInteraction(interaction, LogPosition(topic_id, partition, offset)))
    return events


def write_log(root: Path, events: list[LoggedInteraction]) -> None:
    """Log the events like the worker, in files of a few hundred."""
    log = OfflineLog(root)
    for begin in range(0, len(events), 500):
        for partition in (0, 1):
            log.append([event for event in events[begin : begin + 500] if event.position.partition == partition])


def test_offline_histories_are_those_that_were_served(tmp_path: Path) -> None:
    """After each of 10,000 events, the offline history equals the history served at that time."""
    own = recorded(tmp_path)
    before = latest_histories(build(tmp_path / "before", IngestSources(*own, (), ROLES)))
    rows: dict[str, UserHistory] = {row.user_id: row for row in before}
    served = []
    for logged in (events := clicks()):
        row = apply(rows.get(logged.event.user_id), [logged.event], history_limits(MAX_ITEMS), ROLES).row
        assert row is not None
        rows[row.user_id] = row
        served.append((row.user_id, row.row_time_us, history_digest(row.item_ids)))
    write_log(tmp_path / "log", events)
    tables = build(tmp_path / "after", IngestSources(*own, live_log_files(tmp_path / "log"), ROLES))
    offline = {
        (row["user_id"], row["row_time_us"]): history_digest(tuple(row["item_ids"]))
        for row in pl.read_parquet(tables / "user_history.parquet").iter_rows(named=True)
    }

    mismatches = [row for row in served if offline.get(row[:2]) != row[2]]

    assert len(served) == NUM_IMPRESSIONS
    assert mismatches == []
    assert {row.user_id: row for row in latest_histories(tables)} == {
        user_id: replace(row, recent_event_digests=b"") for user_id, row in rows.items()
    }
