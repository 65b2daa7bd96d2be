"""The join of a large log, in a process of its own whose memory counts, compared with a slow search for every click."""

import resource
import time
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import polars as pl

from benchmarks.experiments.clicks import make_log, truth_of
from pipelines.experiments.join import join

_NUM_IMPRESSIONS = 100_000


def joined(seed: int) -> dict[str, Any]:
    """Join a log of 10^5 impressions; return whether the result is the truth, its time and its memory."""
    log = make_log(_NUM_IMPRESSIONS, seed)
    wanted = truth_of(log)
    with TemporaryDirectory() as scratch:
        impressions, events = log.write(Path(scratch))
        out = Path(scratch) / "out"
        with get_context("spawn").Pool(1) as pool:
            seconds, peak_mb = pool.apply(_timed_join, (impressions, events, out))
        table = pl.read_parquet(out / "*.parquet").filter(pl.col("clicks") > 0)
    rows = table.select("request_id", "shown_time_ms", "item_id", "clicks", "value", "clicked_time_ms")
    found = {row[:3]: row[3:] for row in rows.iter_rows()}
    return {
        "num_impressions": len(log.impressions),
        "num_events": len(log.events),
        "num_joined": sum(one[0] for one in wanted.values()),
        "is_equal": found == wanted and len(rows) == len(wanted),
        "join_s": round(seconds, 2),
        "peak_mb": round(peak_mb),
    }


def _timed_join(impressions: Path, events: Path, out: Path) -> tuple[float, float]:
    started = time.monotonic()
    for _ in join(impressions, events, out):
        pass
    return time.monotonic() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1_024
