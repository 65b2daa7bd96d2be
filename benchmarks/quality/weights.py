"""Weights of event types: what ratings as weights are worth on the labels that users rated high.

    python -m benchmarks.quality weights --json OUT [--state FOLDER] [--seeds 1] [--epochs N]

Data: ml-100k, each rating an event type of its own. Decoder and student are trained twice with the recipe that the pipeline takes: `even`, where every type has the weight 1, and `rated`, where each
type's weight is its rating, 1 to 5. Both rank the same test labels; NDCG@10 as served, each user's the mean over the seeds: over the labels rated 4 and 5, and over all.
`difference` is rated less even, with the 95 % bootstrap interval over users, paired.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from rich.console import Console

from benchmarks.load.command import about_run, at_least_one, report_parser, write_report
from benchmarks.quality.own_store import with_own_store
from benchmarks.quality.trained_pair import fit_pair
from benchmarks.quality.warm_start import judge
from infra.local.servers.store import feature_store
from pipelines.data.examples import Split, read_cases
from pipelines.options import PipelineOptions, Places
from pipelines.run import run_pipeline
from pipelines.scoring.metrics import interval
from pipelines.training.recipes import choose, data_size, read_recipes
from services.contracts.event_roles import DEFAULT_ROLES, EventRoles, parse_event_roles
from services.errors import TailraceError
from services.settings.settings import Settings, load_settings

_RATINGS = range(1, 6)
HIGH = 4.0


def main() -> None:
    """Train what the state folder lacks, rank the labels, and write the file."""
    options = _options()
    console = Console(stderr=True)
    torch.set_num_threads(1)
    settings = with_own_store(load_settings(), options.state)
    rated = parse_event_roles("".join(f"[types.rating-{rating}]\nweight = {rating}\n" for rating in _RATINGS))
    try:
        with feature_store(settings, console.print):
            tables = rating_tables(settings, console)
            tokens = {
                name: tokenized_by(settings, tables, roles, console)
                for name, roles in (("even", DEFAULT_ROLES), ("rated", rated))
            }
        gained = {
            name: _gained(folder, settings.state_dir / "weights" / name, options, console)
            for name, folder in tokens.items()
        }
    except TailraceError as error:
        sys.exit(f"error: {error}")
    rows = compare(gained["even"], gained["rated"], _label_ratings(tokens["even"], tables[0]))
    write_report(options.json, about_run("quality weights") | {"num_seeds": options.seeds, "rows": rows})


def compare(even: dict[str, np.ndarray], rated: dict[str, np.ndarray], ratings: np.ndarray) -> list[dict[str, Any]]:
    """Return a row for each model and group of labels. All arrays are aligned by test case."""
    rows = []
    for model in even:
        for labels, chosen in (("rated 4 and 5", ratings >= HIGH), ("all", ratings > 0)):
            before, after = even[model][chosen], rated[model][chosen]
            row = {"model": model, "labels": labels, "num_users": int(chosen.sum())}
            means = {"even": float(before.mean()), "rated": float(after.mean())}
            rows.append(
                row
                | means
                | {"difference": float((after - before).mean()), "ci95": list(interval(after - before, seed=0))}
            )
    return rows


def rating_tables(settings: Settings, console: Console) -> tuple[Path, Path]:
    """Write events and items as tables, in which each rating is a type."""
    report = run_pipeline(PipelineOptions(with_live_log=False, until="ingest"), Places.from_settings(settings), console)
    ingested, folder = report.stages[-1].path, settings.state_dir / "weights"
    folder.mkdir(parents=True, exist_ok=True)
    events = pl.read_parquet(ingested / "events.parquet").select("user_id", "item_id", "event_time", "value")
    kind = pl.concat_str(pl.lit("rating-"), pl.col("value").cast(pl.Int64).cast(pl.String))
    events.with_columns(event_type=kind).write_parquet(folder / "ratings.parquet")
    pl.read_parquet(ingested / "items.parquet").write_parquet(folder / "items.parquet")
    return folder / "ratings.parquet", folder / "items.parquet"


def tokenized_by(settings: Settings, tables: tuple[Path, Path], roles: EventRoles, console: Console) -> Path:
    """Run the pipeline on these tables, with these roles of events, until its examples are made, and return their folder."""
    events, items = tables
    options = PipelineOptions(events=events, items=items, with_live_log=False, until="tokenize")
    places = replace(Places.from_settings(settings), event_roles=roles)
    return run_pipeline(options, places, console).stages[-1].path


def _gained(tokenized: Path, state: Path, options: argparse.Namespace, console: Console) -> dict[str, np.ndarray]:
    """Return by model the NDCG@10 of each test case, the mean over the seeds."""
    found: dict[str, list[np.ndarray]] = {}
    for seed in range(options.seeds):
        recipes = read_recipes(epochs=options.epochs, student_epochs=options.epochs, seed=seed)
        recipe = choose(recipes, data_size(tokenized))
        folder = state / f"{tokenized.name}-{seed}"
        fit_pair(tokenized, recipe, folder, console)
        for (model, split), gained in judge(tokenized, recipe, folder).ndcg.items():
            if split == "test":
                found.setdefault(model, []).append(gained)
    return {model: np.mean(gained, axis=0) for model, gained in found.items()}


def _label_ratings(tokenized: Path, events: Path) -> np.ndarray:
    """Return the rating of each test label."""
    cases = read_cases(tokenized, Split.TEST)
    newest = pl.read_parquet(events).sort("event_time").group_by("user_id").last()
    of_user = dict(newest.select("user_id", "value").iter_rows())
    return np.array([of_user[user_id] for user_id in cases.user_ids])


def _options() -> argparse.Namespace:
    parser = report_parser(__doc__)
    folder = "folder of stage outputs, store and models (default: quality in the state folder)"
    parser.add_argument("--state", type=Path, metavar="FOLDER", help=folder)
    parser.add_argument("--seeds", type=at_least_one, default=1, help="number of seeds, from 0")
    parser.add_argument("--epochs", type=at_least_one, help="epochs of decoder and student, instead of the recipe's")
    return parser.parse_args()
