"""Runs one stage of the pipeline in this process, on earlier stages' output in the state folder; prints its cost."""

import json
import os
import resource
import sys
import time
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

import polars as pl
import torch
from rich.console import Console

from benchmarks.pipeline.tables import EVENTS, ITEMS, write_tables
from pipelines.codes.options import CodesOptions
from pipelines.options import PipelineOptions
from pipelines.places import Places
from pipelines.run import flow
from pipelines.runner.bars import Bars
from pipelines.stages import ModelRun
from pipelines.training.recipes import read_recipes
from services.settings.settings import load_settings


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
