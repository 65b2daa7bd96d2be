"""Dislikes: the value of training against items that users rated low, and its cost on items that they rated high.

    python -m benchmarks.quality dislikes --json OUT [--state FOLDER] [--weight 1] [--epochs N] [--alone]

Data: ml-100k; ratings of 1 and 2 are negative events, held out from training for every fifth user. Decoder and student
are trained with the pipeline's recipe: `dropped` with weight 0 for dislikes, and `against` with the given weight. With
`--alone` only students are trained, without a decoder. Both rank, after the same histories, the test labels rated 4 and
5 (NDCG@10), and the items rated 1 and 2 (their mean rank among the unseen, by user): for the held-out users, and for
all other users, whose dislikes were trained on and are never shown to them again. `difference` is against minus
dropped, with the paired 95 % bootstrap interval over users.
"""

import argparse
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from rich.console import Console

from benchmarks.load.command import about_run, at_least_one, exit_on_errors, report_parser, write_report
from benchmarks.quality.own_store import with_own_store
from benchmarks.quality.trained_pair import fit_pair, scorers_of
from benchmarks.quality.variants import ALONE, train_alone
from infra.local.servers.store import feature_store
from models.catalogue import load_catalogue
from models.student import read_student
from pipelines.data.examples import Cases, Split, read_cases
from pipelines.options import PipelineOptions
from pipelines.places import Places
from pipelines.run import run_pipeline
from pipelines.runner.stage import silent
from pipelines.scoring.metrics import Scorer, gains, interval, rank_labels
from pipelines.scoring.student import StudentScorer
from pipelines.training.fit.checkpoints import Checkpoints
from pipelines.training.recipes import Recipe, choose, data_size, read_recipes
from services.contracts.event_roles import parse_event_roles
from services.settings.settings import load_settings

_LOW, _HIGH = (1.0, 2.0), 4.0
_EVERY = 5
_HELD_OUT = "held-out"


@dataclass(frozen=True, slots=True)
class Found:
    """Results of one training by user: NDCG@10 of labels rated high, mean ranks of held-out and of trained dislikes."""

    ndcg: np.ndarray
    rank_held_out: np.ndarray
    rank_learned: np.ndarray


def main() -> None:
    """Train the models that the state folder lacks, rank, and write the file."""
    options = _options()
    console = Console(stderr=True)
    torch.set_num_threads(1)
    settings = with_own_store(load_settings(), options.state)
    with exit_on_errors():
        with feature_store(settings, console.print):
            places, wanted = Places.from_settings(settings), PipelineOptions(with_live_log=False, until="ingest")
            ingested = run_pipeline(wanted, places, console).stages[-1].path
            events = hold_out(ingested / "events.parquet", settings.state_dir / "dislikes")
            wanted = replace(wanted, events=events, items=ingested / "items.parquet", until="tokenize")
            tokens = {}
            for name, weight in (("dropped", 0.0), ("against", options.weight)):
                roles = "".join(f"[types.rating-{low:g}]\nrole = 'negative'\nweight = {weight}\n" for low in _LOW)
                given = parse_event_roles(f"{roles}[types.{_HELD_OUT}]\nrole = 'ignored'\n")
                tokens[name] = run_pipeline(wanted, replace(places, event_roles=given), console).stages[-1].path
        found = {name: _found(folder, events, settings.state_dir, options, console) for name, folder in tokens.items()}
    rows = [row for model in found["dropped"] for row in compare(model, *(found[name][model] for name in tokens))]
    write_report(options.json, about_run("quality dislikes") | {"weight": options.weight, "rows": rows})


def hold_out(ratings: Path, out: Path) -> Path:
    """Write the events with ratings as types, and a type for every fifth user's low ratings; return the path."""
    out.mkdir(parents=True, exist_ok=True)
    events = pl.read_parquet(ratings).select("user_id", "item_id", "event_time", "value")
    every = events.select(pl.col("user_id").unique().sort()).gather_every(_EVERY)["user_id"]
    is_held_out = pl.col("value").is_in(_LOW) & pl.col("user_id").is_in(every.implode())
    kind = pl.concat_str(pl.lit("rating-"), pl.col("value").cast(pl.Int64))
    path = out / "ratings.parquet"
    events.with_columns(event_type=pl.when(is_held_out).then(pl.lit(_HELD_OUT)).otherwise(kind)).write_parquet(path)
    return path


def compare(model: str, dropped: Found, against: Found) -> list[dict[str, Any]]:
    """Return a row for each measure. All arrays are aligned by user."""
    rows = []
    for one in fields(Found):
        measure, before, after = one.name, getattr(dropped, one.name), getattr(against, one.name)
        means = {"dropped": float(before.mean()), "against": float(after.mean())}
        difference = {"difference": float((after - before).mean()), "ci95": list(interval(after - before, seed=0))}
        rows.append({"model": model, "measure": measure, "num_users": len(before)} | means | difference)
    return rows


def _found(
    tokenized: Path, events: Path, state: Path, options: argparse.Namespace, console: Console
) -> dict[str, Found]:
    recipe = choose(read_recipes(epochs=options.epochs, student_epochs=options.epochs), data_size(tokenized))
    folder = state / "dislikes" / tokenized.name
    if options.alone:
        scorers: dict[str, Scorer] = {"student": StudentScorer(read_student(_fit_alone(tokenized, recipe, folder)))}
    else:
        fit_pair(tokenized, recipe, folder, console)
        scorers = scorers_of(folder, recipe)
    index = load_catalogue(tokenized / "catalogue.parquet").index_of
    test, table = read_cases(tokenized, Split.TEST), pl.read_parquet(events)
    high = _rated_high(test, table)
    is_held_out = pl.col("event_type") == _HELD_OUT
    low = pl.col("value").is_in(_LOW)
    groups = [_disliked(test, table.filter(low & one), index) for one in (is_held_out, ~is_held_out)]
    return {
        model: Found(gains(rank_labels(scorer, high).masked, 10), *(_mean_ranks(scorer, group) for group in groups))
        for model, scorer in scorers.items()
    }


def _fit_alone(tokenized: Path, recipe: Recipe, folder: Path) -> Path:
    """Train a student without a decoder unless the folder has it, and return its file."""
    path = folder / f"{ALONE}.safetensors"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        saved = Checkpoints(folder / "saved" / "alone", "distill", 60.0)
        train_alone(tokenized, recipe.distill, folder, saved, torch.device("cpu"), silent)
    return path


def _mean_ranks(scorer: Scorer, disliked: Cases) -> np.ndarray:
    ranks, users = rank_labels(scorer, disliked).masked, np.unique(disliked.user_ids, return_inverse=True)[1]
    means: np.ndarray = np.bincount(users, ranks) / np.bincount(users)
    return means


def _rated_high(test: Cases, events: pl.DataFrame) -> Cases:
    newest = events.filter(pl.col("value") > max(_LOW)).sort("event_time").group_by("user_id").last()
    rating_of = dict(newest.select("user_id", "value").iter_rows())
    places = [place for place, user_id in enumerate(test.user_ids) if rating_of[user_id] >= _HIGH]
    return _taken(test, places, test.targets[places])


def _disliked(test: Cases, events: pl.DataFrame, index: dict[str, int]) -> Cases:
    """Return these users' test cases with each of these items as label."""
    disliked_by = dict(events.group_by("user_id").agg("item_id").iter_rows())
    pairs = [
        (place, index[item]) for place, user_id in enumerate(test.user_ids) for item in disliked_by.get(user_id, [])
    ]
    return _taken(test, [place for place, _ in pairs], np.array([item for _, item in pairs]))


def _taken(cases: Cases, places: list[int], targets: np.ndarray) -> Cases:
    users, histories = (
        tuple(cases.user_ids[place] for place in places),
        tuple(cases.histories[place] for place in places),
    )
    return Cases(users, histories, targets, cases.idle_s[places])


def _options() -> argparse.Namespace:
    parser = report_parser(__doc__)
    folder = "folder of stage outputs, store and models (default: quality in the state folder)"
    parser.add_argument("--state", type=Path, metavar="FOLDER", help=folder)
    parser.add_argument("--weight", type=float, default=1.0, help="weight of a dislike, above 0 to 10")
    parser.add_argument("--alone", action="store_true", help="students without a decoder")
    parser.add_argument("--epochs", type=at_least_one, help="epochs of decoder and student, instead of the recipe's")
    return parser.parse_args()
