"""Offline features through Feast."""

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest

from models.prompt import window_start
from pipelines.features.point_in_time import histories_as_of
from pipelines.features.tables import build_tables, latest_histories, serve
from pipelines.runner.stage import silent
from services.contracts.features import history_digest
from services.features.reader import FeatureReader
from services.features.repo import RepoAddress
from services.features.writer import FeatureWriter
from tests.support.gateway.rows import history_row
from tests.support.training.synthetic import write_arrivals

START = datetime(2026, 1, 1, tzinfo=UTC)
MAX_ITEMS = 6
TIMES = {"user_id": pl.String(), "event_timestamp": pl.Datetime("us", "UTC")}
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def random_events(num_events: int, num_users: int) -> pl.DataFrame:
    """Build events of several users at random distances, many of them a microsecond apart."""
    draw = random.Random(7)
    at, rows = START, []
    for _ in range(num_events):
        at += timedelta(microseconds=draw.choice((1, 1, 500, 3_600_000_000)))
        rows.append(
            (f"u{draw.randrange(num_users)}", f"i{draw.randrange(30)}", at, "rating", float(draw.randrange(1, 6)))
        )
    columns = ["user_id", "item_id", "event_time", "event_type", "value"]
    return pl.DataFrame(rows, columns, orient="row", schema_overrides={"event_time": pl.Datetime("us", "UTC")})


EVENTS = random_events(80, num_users=7)


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stage's output for these events."""
    out = tmp_path_factory.mktemp("tables")
    write_arrivals(EVENTS, out)
    build_tables(out, MAX_ITEMS, out, silent)
    return out


def history_at(user_id: str, when: datetime) -> list[str]:
    """Return the history by filtering the events: the oracle."""
    theirs = EVENTS.filter((pl.col("user_id") == user_id) & (pl.col("event_time") <= when))
    item_ids = theirs["item_id"].to_list()
    return item_ids[window_start(len(item_ids), MAX_ITEMS, MAX_ITEMS // 2) :]


def test_no_row_sees_its_future(tables: Path, features: RepoAddress) -> None:
    """At, just before and just after each event, each user's history holds exactly the events up to then.

    Before the first event, and for a user without events (u7), the history is empty.
    """
    serve(tables, features, features.repo_dir / "log", silent)
    near = [timedelta(microseconds=micros) for micros in (-1, 0, 1)]
    moments = sorted({at + shift for at in EVENTS["event_time"].to_list() for shift in near})
    rows = [(f"u{number}", when) for when in moments for number in range(8)]
    random.Random(1).shuffle(rows)

    answer = histories_as_of(features, pl.DataFrame(rows, TIMES, orient="row"))

    assert answer.select("user_id", "event_timestamp").rows() == rows
    expected = [history_at(user, when) for user, when in rows]
    assert answer["history_item_ids"].to_list() == expected
    assert [num == 0 for num in answer["num_events"]] == [not ids for ids in expected]
    assert answer["newest_event_time_ms"].is_null().to_list() == [not ids for ids in expected]


async def test_online_histories_are_the_newest_offline_ones(tables: Path, features: RepoAddress) -> None:
    """After materialising, served features equal the offline history as of the served row's own time."""
    serve(tables, features, features.repo_dir / "log", silent)
    reader = FeatureReader(features, num_partitions=1)
    served = {row.user_id: await reader.read(row.user_id, "v1", 10.0) for row in latest_histories(tables)}
    await reader.close()
    requested = [(user_id, EPOCH + timedelta(microseconds=features.as_of_us)) for user_id, features in served.items()]

    offline = histories_as_of(features, pl.DataFrame(requested, TIMES, orient="row"))

    assert len(served) == 7
    digests = [history_digest(tuple(ids)) for ids in offline["history_item_ids"]]
    assert digests == [features.history_digest for features in served.values()]


def test_materialising_again_leaves_the_workers_rows_alone(tables: Path, features: RepoAddress) -> None:
    """A row that the stream worker wrote later is newer than the tables and is kept."""
    serve(tables, features, features.repo_dir / "log", silent)
    later_us = FeatureWriter(features).read_histories(["u1"])["u1"].row_time_us + 1
    live = history_row("u1", ("clicked",), later_us, topic_id="topic")
    FeatureWriter(features).write_histories([live])

    serve(tables, features, features.repo_dir / "log", silent)

    assert FeatureWriter(features).read_histories(["u1"]) == {"u1": live}
