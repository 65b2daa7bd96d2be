"""Ingest drops erased users from given tables by time, and from the live log by position."""

from pathlib import Path

import polars as pl

from pipelines.data.ingest import IngestSources, ingest, key, live_log_files
from pipelines.tables.options import TableOptions
from services.contracts.erasure import Erasure
from services.features.schema import LogPosition
from services.stream.decode import LoggedErasure
from services.stream.erasure.tables import remove_outputs
from services.stream.log.ledger import ErasureLedger
from tests.support.training.synthetic import raw_events, raw_items
from tests.unit.pipelines.data.test_ingest import live_file, own_tables


def test_a_user_of_rejected_rows_is_found_whatever_the_column(tmp_path: Path) -> None:
    """An output is removed even if only rows set aside have the user, also where the id was written as `9.0`."""
    own, out = own_tables(tmp_path), tmp_path / "pipeline" / "ingest" / "0123"
    rows = pl.read_csv(own[0], infer_schema=False).rename({"user_id": "visitor"})
    unknown = rows[:1].with_columns(item_id=pl.lit("unknown"), visitor=pl.lit("9.0"))
    pl.concat([rows, unknown]).write_csv(own[0])
    out.mkdir(parents=True)

    ingest(IngestSources(*own, (), tables=TableOptions(names={"visitor": "user_id"})), tmp_path / "cache", out)
    for user_id, is_kept in (("10", True), ("9", False)):
        assert remove_outputs(tmp_path / "pipeline", {user_id}.__contains__)
        assert out.exists() == is_kept


def test_erased_users_are_in_nothing_that_is_ingested(tmp_path: Path) -> None:
    """Events before the erasure appear in no output, the given table is unchanged, and later events remain."""
    events = raw_events(3, 5, 4)
    user_id = str(events["user_id"][0])
    last_s = int(events.filter(pl.col("user_id") == events["user_id"][0])["event_time"].cast(pl.Int64).max())  # type: ignore[arg-type]
    broken = events[:1].with_columns(item_id=pl.lit("unknown item").cast(events.schema["item_id"]))
    own = own_tables(tmp_path, pl.concat([events, broken]), raw_items(5))
    log, item_id = tmp_path / "log", str(events["item_id"][0])
    rows = [(f"e{at}", user_id, item_id, (last_s + 100 + at) * 1_000) for at in range(4)]
    live_file(log, "partition=0/t/00000000000000000000-00000000000000000003.parquet", rows)
    ledger = ErasureLedger(log)
    before = IngestSources(*own, live_log_files(log), erasures=ledger)
    key_before = key(before)
    erasure = Erasure(erasure_id="x", user_id=user_id, accepted_time_ms=last_s * 1_000)
    ledger.append([LoggedErasure(erasure, LogPosition("t", 0, 1))], ["t"])
    out = tmp_path / "out"
    out.mkdir()

    ingest(before, tmp_path / "cache", out)

    arrivals = pl.read_parquet(out / "arrivals.parquet")
    theirs = arrivals.filter(pl.col("user_id") == user_id)
    assert theirs["event_id"].to_list() == ["e2", "e3"]
    assert arrivals["user_id"].n_unique() == 3
    assert user_id not in pl.read_parquet(out / "rejected_events.parquet")["user_id"].to_list()
    assert key(before) != key_before
