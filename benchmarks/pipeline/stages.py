"""Runs one stage of the pipeline in this process, on earlier stages' output in the state folder; prints its cost.

The tables are synthetic: items by Zipf's law, lognormal numbers of events per user, no repeated items.
"""

import json
import os
import resource
import sys
import time
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

import numpy as np
import polars as pl
import torch
from rich.console import Console

from pipelines.codes.options import CodesOptions
from pipelines.options import PipelineOptions
from pipelines.places import Places
from pipelines.run import flow
from pipelines.runner.bars import Bars
from pipelines.stages import ModelRun
from pipelines.training.recipes import read_recipes
from services.settings.settings import load_settings

EVENTS, ITEMS = "events.parquet", "items.parquet"
_MEDIAN_EVENTS, _SIGMA, _MOST_EVENTS = 20, 1.1, 500
_DRAWN = 3
"""Events drawn per kept event: a repeated item of a user is discarded."""
_FIRST_TIME_S, _DAYS = 1_700_000_000, 90
_NUM_WORDS, _WORDS_PER_TITLE, _NUM_CATEGORIES = 5_000, 4, 50


def write_tables(folder: Path, num_events: int, num_items: int) -> None:
    """Write both tables with a fixed seed. Exits if there are too few items for the events."""
    rng = np.random.default_rng(0)
    _events(rng, num_events, num_items).write_parquet(folder / EVENTS)
    _items(rng, num_items).write_parquet(folder / ITEMS)


def _events(rng: np.random.Generator, num_events: int, num_items: int) -> pl.DataFrame:
    num_drawn = _DRAWN * num_events
    counts = rng.lognormal(np.log(_MEDIAN_EVENTS), _SIGMA, num_drawn // 10).clip(1, _MOST_EVENTS).astype(np.int64)
    users = np.repeat(np.arange(len(counts)), counts)[:num_drawn]
    reached = np.cumsum(1 / np.arange(1, num_items + 1))
    ranks = np.searchsorted(reached, rng.random(len(users)) * reached[-1])
    drawn = pl.DataFrame({"user": users, "item": rng.permutation(num_items)[ranks]})
    pairs = drawn.unique(maintain_order=True).head(num_events)
    if len(pairs) < num_events:
        raise SystemExit(f"error: {num_items} items give {len(pairs)} different events instead of {num_events}")
    return pairs.select(
        user_id=pl.format("user-{}", "user"),
        item_id=pl.format("item-{}", "item"),
        event_time=pl.Series(_FIRST_TIME_S + rng.integers(0, _DAYS * 86_400, num_events)),
        event_type=pl.lit("click"),
        value=pl.lit(1.0),
    )


def _items(rng: np.random.Generator, num_items: int) -> pl.DataFrame:
    words = np.array([f"word{number}" for number in range(_NUM_WORDS)])
    titles = words[rng.integers(0, _NUM_WORDS, (num_items, _WORDS_PER_TITLE))]
    return pl.DataFrame(
        {
            "item_id": [f"item-{number}" for number in range(num_items)],
            "title": [" ".join(title) for title in titles],
            "categories": [f"kind{number}" for number in rng.integers(0, _NUM_CATEGORIES, num_items)],
        }
    )


def main() -> None:
    """Run the stage of the command line. Earlier stages are done already; their time and memory do not count."""
    name, *sizes = sys.argv[1:]
    settings = load_settings()
    events, items = settings.state_dir / EVENTS, settings.state_dir / ITEMS
    if name == "tables":
        write_tables(settings.state_dir, *map(int, sizes))
        print("{}")
        return
    torch.set_num_threads(1)
    num_items = pl.scan_parquet(items).select(pl.len()).collect().item()
    options = PipelineOptions(
        events=events,
        items=items,
        with_live_log=False,
        codes=CodesOptions(depth=CodesOptions().depth_for(num_items)),
        recipes=read_recipes(epochs=1, student_epochs=1),
        refit=False,
        force=True,
    )
    taken = _Taken()
    with Bars(Console(file=StringIO())) as bars:
        for output in flow(ModelRun(options=options, places=Places.from_settings(settings)), bars):
            if output.stage == name:
                print(json.dumps(taken.row()))
                return
            taken = _Taken()


@dataclass(slots=True)
class _Taken:
    """The use of resources by this process from now on."""

    began_s: float = field(default_factory=time.perf_counter)
    began_cpu_s: float = field(default_factory=lambda: sum(os.times()[:4]))

    def __post_init__(self) -> None:
        """Reset the kernel's peak memory of this process."""
        Path("/proc/self/clear_refs").write_text("5")

    def row(self) -> dict[str, float]:
        """Return wall seconds, processor seconds and peak memory, including child processes that have ended."""
        cpu_s = sum(os.times()[:4]) - self.began_cpu_s
        status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
        rss_kb = max(int(status["VmHWM"].split()[0]), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
        seconds = round(time.perf_counter() - self.began_s, 2)
        return {"seconds": seconds, "cpu_s": round(cpu_s, 2), "rss_mb": round(rss_kb / 1_024)}
