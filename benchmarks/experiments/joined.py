"""The join of a large log, compared with a slow search for every click."""

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import polars as pl

from benchmarks.experiments.clicks import make_log, truth_of
from pipelines.experiments.join import join

_NUM_IMPRESSIONS = 100_000


def joined(seed: int) -> dict[str, Any]:
    """Join a log of 10^5 impressions; return whether the result is the truth, and its time."""
    log = make_log(_NUM_IMPRESSIONS, seed)
    wanted = truth_of(log)
    with TemporaryDirectory() as scratch:
        impressions, events = log.write(Path(scratch))
        out, started = Path(scratch) / "out", time.monotonic()
        for _ in join(impressions, events, out):
            pass
        seconds = time.monotonic() - started
        table = pl.read_parquet(out / "*.parquet").filter(pl.col("clicks") > 0)
    rows = table.select("request_id", "shown_time_ms", "item_id", "clicks", "value", "clicked_time_ms")
    found = {row[:3]: row[3:] for row in rows.iter_rows()}
    return {
        "num_impressions": len(log.impressions),
        "num_events": len(log.events),
        "num_joined": sum(one[0] for one in wanted.values()),
        "is_equal": found == wanted and len(rows) == len(wanted),
        "join_s": round(seconds, 2),
    }
