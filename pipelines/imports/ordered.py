"""Events in order of time, of any number: sorted parts on disk, read one stretch of time after another.

A file of events may exceed memory, and its newest events may come first.
"""

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import polars as pl

STRETCH_ROWS = 1_000_000


class OrderedEvents:
    """The events of one table by time, ties by row or from the last row up. `remove` deletes its folder."""

    def __init__(self, folder: Path, batches: Iterable[pl.DataFrame]) -> None:
        self._folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.num_rows, self._num_parts = 0, 0
        waiting: list[pl.DataFrame] = []
        for batch in batches:
            waiting.append(batch)
            if sum(len(frame) for frame in waiting) >= STRETCH_ROWS:
                self._write(pl.concat(waiting))
                waiting = []
        if waiting and (left := pl.concat(waiting)).height:
            self._write(left)

    def stretches(self, *, is_newest_first: bool = False) -> Iterator[pl.DataFrame]:
        """Yield the events, one stretch of time at a time; of a table that is newest first, ties in reverse."""
        if not self._num_parts:
            return
        parts = pl.scan_parquet(self._folder / "*.parquet")
        edges = self._edges(parts)
        for least, most in zip((None, *edges), (*edges, None), strict=True):
            rows = parts if least is None else parts.filter(pl.col("event_time") >= least)
            rows = rows if most is None else rows.filter(pl.col("event_time") < most)
            stretch = rows.collect().sort("event_time", "row", descending=[False, is_newest_first], maintain_order=True)
            if stretch.height:
                yield stretch

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _edges(self, parts: pl.LazyFrame) -> pl.Series:
        """Return the times that divide the events into stretches of about equal size."""
        if self.num_rows <= 2 * STRETCH_ROWS:
            return pl.Series([], dtype=pl.Datetime("us", "UTC"))
        times = parts.select("event_time").collect()["event_time"].sort()
        places = np.arange(STRETCH_ROWS, self.num_rows, STRETCH_ROWS)
        return times[places.tolist()].unique(maintain_order=True)

    def _write(self, events: pl.DataFrame) -> None:
        ordered = events.sort("event_time", "row", maintain_order=True)
        ordered.write_parquet(self._folder / f"{self._num_parts:06}.parquet", compression="lz4")
        self._num_parts += 1
        self.num_rows += events.height
