"""Model quality: the protocol of pipelines/evaluation/evaluate.py over several seeds, with all baselines.

    python -m benchmarks.quality --json OUT [--seeds 3] [--state FOLDER] [--sequences FOLDER] [--recipes FILE] [--epochs N]

Default data: ml-100k. `--sequences` takes a folder with `sequences.txt` (`user item item ...`, in time order) and
`items.jsonl` instead. Histories come from the feature store, as in the pipeline; each seed trains decoder, student and twin
again. Stage outputs that the state folder already holds are reused. `--epochs` shortens training to check that it runs; its
numbers mean nothing.
"""

import argparse
import json
import platform
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

import polars as pl
from rich.console import Console

from benchmarks.load.command import at_least_one, command_of, report_parser, write_report
from infra.local.servers.store import feature_store
from services.features.repo import RepoAddress
from services.settings.settings import Settings, load_settings

if TYPE_CHECKING:
    from pipelines.options import PipelineOptions, Places

SHOWN = ("hr@5", "ndcg@5", "hr@10", "ndcg@10", "hr@10_unmasked", "ndcg@10_unmasked")
FIRST_EVENT_S = 1_400_000_000


def main() -> None:
    """Train and evaluate each seed, then write means and standard deviations."""
    from pipelines.run import run_pipeline  # not at the top: the process that joins features imports this file again

    options = _options()
    settings = load_settings()
    state_dir = (options.state or settings.state_dir).absolute()
    console = Console(stderr=True)
    runs = []
    with feature_store(settings.model_copy(update={"state_dir": state_dir}), console.print):
        for seed in range(options.seeds):
            began = time.perf_counter()
            report = run_pipeline(_pipeline(options, state_dir, seed), _places(settings, state_dir), console)
            assert report.evaluation is not None
            seconds = {stage.stage: round(stage.seconds, 1) for stage in report.stages if not stage.skipped}
            runs.append(
                {"seed": seed, "seconds": round(time.perf_counter() - began, 1), "stages_s": seconds}
                | report.evaluation
            )
    write_report(options.json, _summary(runs))


def _options() -> argparse.Namespace:
    parser = report_parser(__doc__)
    parser.add_argument("--seeds", type=at_least_one, default=3, help="number of seeds, from 0")
    parser.add_argument(
        "--state",
        type=Path,
        metavar="FOLDER",
        help="folder of stage outputs (default: the state folder of the settings)",
    )
    parser.add_argument("--sequences", type=Path, metavar="FOLDER", help="data other than ml-100k")
    parser.add_argument("--recipes", type=Path, metavar="FILE", help="recipes other than the shipped ones")
    parser.add_argument("--epochs", type=at_least_one, help="epochs of decoder and student, instead of the recipe's")
    return parser.parse_args()


def _pipeline(options: argparse.Namespace, state_dir: Path, seed: int) -> "PipelineOptions":
    from pipelines.options import PipelineOptions
    from pipelines.training.recipes import read_recipes

    recipes = read_recipes(options.recipes, epochs=options.epochs, student_epochs=options.epochs, seed=seed)
    chosen = PipelineOptions(until="evaluate", with_live_log=False, recipes=recipes)
    if options.sequences is not None:
        events, items = as_tables(options.sequences, state_dir / "tables")
        chosen = replace(chosen, events=events, items=items)
    return chosen


def _places(settings: Settings, state_dir: Path) -> "Places":
    from pipelines.options import Places

    return Places(
        state_dir=state_dir,
        cache_dir=settings.cache_dir.absolute(),
        bundle_root=state_dir / "bundles",
        offline_log_dir=state_dir / "log",
        feature_repo=RepoAddress(state_dir / "features", settings.redis_address),
        history_max_items=settings.history_max_items,
        keep_bundles=settings.keep_bundles,
    )


def as_tables(source: Path, out: Path) -> tuple[Path, Path]:
    """Write a folder of sequences as the pipeline's own events and items: the n-th event of a user is n seconds old."""
    out.mkdir(parents=True, exist_ok=True)
    events, items = out / f"{source.name}.parquet", out / f"{source.name}_items.parquet"
    pl.DataFrame(_events(source), schema=["user_id", "item_id", "event_time"], orient="row").write_parquet(events)
    with (source / "items.jsonl").open() as lines:
        rows = [json.loads(line) for line in lines]
    named = {str(row["item_id"]): str(row.get("title") or "untitled") for row in rows}
    pl.DataFrame({"item_id": list(named), "title": list(named.values())}).write_parquet(items)
    return events, items


def _events(source: Path) -> Iterator[tuple[str, str, int]]:
    with (source / "sequences.txt").open() as lines:
        for line in lines:
            user, *items = line.split()
            for place, item in enumerate(items):
                yield user, item, FIRST_EVENT_S + place


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    models = runs[0]["metrics"]
    spread = {
        name: {
            metric: {"mean": fmean(values), "std": pstdev(values)}
            for metric in SHOWN
            for values in [[run["metrics"][name][metric] for run in runs]]
        }
        for name in models
    }
    return {
        "command": command_of("quality"),
        "machine": {"processor": platform.processor() or platform.machine(), "python": platform.python_version()},
        "dataset": runs[0]["dataset"],
        "protocol": runs[0]["protocol"],
        "metrics": spread,
        "student_share": fmean([run["student_share"] for run in runs]),
        "runs": runs,
    }


if __name__ == "__main__":
    main()
