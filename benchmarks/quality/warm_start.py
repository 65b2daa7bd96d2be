"""Warm start: how much of a whole training's NDCG@10 a start from an earlier one keeps, and in how much of its time.

    python -m benchmarks.quality warm-start --json OUT [--state FOLDER] [--sequences FOLDER] [--new 0.005 0.02] [--seeds 3] [--recipes FILE] [--epochs N]

Default data: ml-100k; `--sequences` is a folder as benchmarks/quality/sequences.py describes it. For each share `--new` a live decoder and student are trained without that share of each
user's newest training events; then both are trained on all events twice: from the beginning (`whole`), and from the live ones as the nightly pipeline does (`warm`). The recipe is the one
that the pipeline takes for this data. NDCG@10 as served, of the test labels and of the validation labels, by which a whole training also chose its best epoch; each user's is
the mean over the seeds. `kept` is that of warm over that of whole, with the 95 % bootstrap interval over users, paired. Times are processor time on one thread.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import polars as pl
import torch
from rich.console import Console

from benchmarks.load.command import about_run, above_zero, at_least_one, report_parser, write_report
from benchmarks.quality.own_store import with_own_store
from benchmarks.quality.sequences import as_tables
from infra.local.servers.store import feature_store
from models.catalogue import load_catalogue
from models.decoder.weights import load_decoder
from models.student import read_student
from pipelines.data.examples import Split, read_cases, read_split
from pipelines.options import PipelineOptions, Places
from pipelines.run import run_pipeline
from pipelines.runner.stage import Progress
from pipelines.scoring.beams import decoder_scorer
from pipelines.scoring.metrics import gains, interval, rank_labels
from pipelines.scoring.student import StudentScorer
from pipelines.training.fit.checkpoints import Checkpoints
from pipelines.training.recipes import Recipe, choose, data_size, read_recipes
from pipelines.training.start.warm_start import MAX_NEW_SHARE, WarmStart
from pipelines.training.train_decoder import read_training, train
from pipelines.training.train_student import Inputs, fit_and_save
from services.errors import StageFailed, TailraceError
from services.settings.settings import load_settings

_SPLITS = {"test": Split.TEST, "validation": Split.VALID}
_CHECKPOINT_EVERY_S = 60.0


def main() -> None:
    """Train everything that the state folder lacks, rank the labels, and write the file."""
    options = _options()
    console = Console(stderr=True)
    torch.set_num_threads(1)
    try:
        tokenized, state = _tokenize(options, console)
        runs = list(_runs(tokenized, state, options, console))
    except TailraceError as error:
        sys.exit(f"error: {error}")
    write_report(options.json, about_run("quality warm-start") | summarise(runs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A decoder with its student: by (model, split) each case's NDCG@10, and the processor time of each model's training."""

    ndcg: dict[tuple[str, str], np.ndarray]
    cpu_s: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The three trainings of one seed and one share of new events."""

    new_share: float
    seed: int
    live: Trained
    whole: Trained
    warm: Trained


def without_newest(tokenized: Path, share: float, out: Path) -> None:
    """Write the stage's folder without this share of each training history's newest events.

    The event after what is left validates. Parts of an event are rounded by chance, so that short histories lose their share too.
    """
    shutil.copytree(tokenized, out, dirs_exist_ok=True)
    rng, rows = np.random.default_rng(0), []
    examples = pl.read_parquet(tokenized / "examples.parquet")
    for row in examples.filter(pl.col("split") == Split.TRAIN).iter_rows(named=True):
        items, labels = row["history"], row["is_label"]
        kept = int(len(items) * (1 - share) + rng.random())
        if kept:
            rows.append(row | {"history": items[:kept], "is_label": labels and labels[:kept]})
        if 2 <= kept < len(items) and (labels is None or labels[kept]):
            rows.append(row | {"split": Split.VALID, "history": items[:kept], "target": items[kept], "is_label": None})
    pl.DataFrame(rows, schema=examples.schema).write_parquet(out / "examples.parquet")
    catalogue = load_catalogue(tokenized / "catalogue.parquet")
    learned = np.concatenate([row["history"] for row in rows if row["split"] == Split.TRAIN])
    popularity = np.bincount(learned, minlength=len(catalogue.item_ids)).astype(np.float64)
    replace(catalogue, popularity=popularity).save(out / "catalogue.parquet")


def fit_models(tokenized: Path, recipe: Recipe, out: Path, progress: Progress, start: WarmStart | None = None) -> None:
    """Train a decoder and its student into a folder that has a bundle's names, and note the processor time of each; skipped if that is noted."""
    noted = out / "cpu_s.json"
    if noted.exists():
        return
    shutil.rmtree(out, ignore_errors=True)
    device, began_s = torch.device("cpu"), time.process_time()
    saved = Checkpoints(out / "saved" / "decoder", "train", _CHECKPOINT_EVERY_S)
    train(tokenized, recipe.train, out, saved, device, progress, start)
    if start is not None and read_training(out)["started_from"] is None:
        raise StageFailed("train", f"the start from {start.version} was refused; the log says why")
    decoder_s = time.process_time() - began_s
    saved = Checkpoints(out / "saved" / "student", "distill", _CHECKPOINT_EVERY_S)
    inputs, path = Inputs(tokenized, 1, device), out / "student.safetensors"
    fit_and_save(inputs, out / "decoder", recipe.distill, path, saved, progress, start)
    shutil.copyfile(tokenized / "catalogue.parquet", out / "catalogue.parquet")
    spent_s = {"decoder": decoder_s, "student": time.process_time() - began_s - decoder_s}
    noted.write_text(json.dumps(spent_s))


def judge(tokenized: Path, recipe: Recipe, folder: Path) -> Trained:
    """Rank the labels of both splits with what `fit_models` wrote."""
    catalogue = load_catalogue(folder / "catalogue.parquet")
    decoder = load_decoder(folder / "decoder", torch.float32, "cpu")
    repeats = bool(read_split(tokenized)["repeats"])
    scorers = {
        "decoder": decoder_scorer(decoder, catalogue, recipe.train.max_items, recipe.train.stride),
        "student": StudentScorer(read_student(folder / "student.safetensors")),
    }
    cases = {name: read_cases(tokenized, split) for name, split in _SPLITS.items()}
    ndcg = {
        (model, name): gains(rank_labels(scorer, of_split).as_served(repeats=repeats), 10)
        for model, scorer in scorers.items()
        for name, of_split in cases.items()
    }
    return Trained(ndcg=ndcg, cpu_s=json.loads((folder / "cpu_s.json").read_text()))


def summarise(runs: list[Run]) -> dict[str, Any]:
    """Return `rows`, one for each share, model and split, and `times`, one for each share and model, over all seeds."""
    rows, times = [], []
    for new_share in dict.fromkeys(run.new_share for run in runs):
        of_share = [run for run in runs if run.new_share == new_share]
        for model, split in of_share[0].whole.ndcg:
            live, whole, warm = (
                np.mean([getattr(run, kind).ndcg[model, split] for run in of_share], axis=0)
                for kind in ("live", "whole", "warm")
            )
            low, high = interval(warm - whole, seed=0)
            of_seeds = [
                float(run.warm.ndcg[model, split].mean() / run.whole.ndcg[model, split].mean()) for run in of_share
            ]
            rows.append(
                {"new_share": new_share, "model": model, "split": split}
                | {"live": float(live.mean()), "whole": float(whole.mean()), "warm": float(warm.mean())}
                | {"kept": float(warm.mean() / whole.mean())}
                | {"ci95": [1 + low / float(whole.mean()), 1 + high / float(whole.mean())]}
                | {"kept_by_seed": of_seeds, "num_users": len(whole)}
            )
        for model in ("decoder", "student"):
            whole_s, warm_s = (fmean(getattr(run, kind).cpu_s[model] for run in of_share) for kind in ("whole", "warm"))
            times.append(
                {"new_share": new_share, "model": model, "whole_cpu_s": whole_s, "warm_cpu_s": warm_s}
                | {"share_of_time": warm_s / whole_s}
            )
    return {"num_seeds": len({run.seed for run in runs}), "rows": rows, "times": times}


def _runs(tokenized: Path, state: Path, options: argparse.Namespace, console: Console) -> Iterator[Run]:
    """Yield the trainings of each seed and share; the whole one of a seed is trained and judged once."""
    before = {share: state / f"without-{share}" for share in options.new}
    for share, folder in before.items():
        without_newest(tokenized, share, folder)
    for seed in range(options.seeds):
        recipes = read_recipes(options.recipes, epochs=options.epochs, student_epochs=options.epochs, seed=seed)
        recipe = choose(recipes, data_size(tokenized))  # for the live one too: a warm start needs the same shape

        def trained(data: Path, name: str, start: WarmStart | None = None, recipe: Recipe = recipe) -> Trained:
            fit_models(data, recipe, state / name, _progress(console, name), start)
            return judge(tokenized, recipe, state / name)

        whole = trained(tokenized, f"whole-{seed}")
        for share in options.new:
            live = trained(before[share], f"live-{share}-{seed}")
            start = WarmStart(state / f"live-{share}-{seed}", "live")
            warm = trained(tokenized, f"warm-{share}-{seed}", start)
            yield Run(new_share=share, seed=seed, live=live, whole=whole, warm=warm)


def _progress(console: Console, what: str) -> Progress:
    def show(done: int, total: int, words: str) -> None:
        console.print(f"{what}: {done} of {total} epochs, {words}", markup=False)

    return show


def _tokenize(options: argparse.Namespace, console: Console) -> tuple[Path, Path]:
    """Run the pipeline up to its tokens, with a store of its own. Return the stage's folder, and the folder for what is trained."""
    settings = with_own_store(load_settings(), options.state)
    events = items = None
    if options.sequences is not None:
        events, items = as_tables(options.sequences, settings.state_dir / "tables")
    chosen = PipelineOptions(events=events, items=items, with_live_log=False, until="tokenize")
    with feature_store(settings, console.print):
        report = run_pipeline(chosen, Places.from_settings(settings), console)
    tokenized = report.stages[-1].path
    return tokenized, settings.state_dir / "warm" / tokenized.name


def _options() -> argparse.Namespace:
    parser = report_parser(__doc__)
    parser.add_argument(
        "--state",
        type=Path,
        metavar="FOLDER",
        help="folder of stage outputs, store and models (default: quality in the state folder)",
    )
    parser.add_argument("--sequences", type=Path, metavar="FOLDER", help="sequences of items by user, in time order")
    parser.add_argument("--recipes", type=Path, metavar="FILE", help="recipes other than the shipped ones")
    parser.add_argument(
        "--new", type=above_zero, nargs="+", default=[0.005, 0.02], metavar="SHARE", help="shares of new events"
    )
    parser.add_argument("--seeds", type=at_least_one, default=3, help="number of seeds, from 0")
    parser.add_argument("--epochs", type=at_least_one, help="epochs of decoder and student, instead of the recipe's")
    options = parser.parse_args()
    for share in options.new:
        if share > MAX_NEW_SHARE:
            parser.error(
                f"argument --new: with more than {MAX_NEW_SHARE:g} new, as with {share:g}, a warm start is refused; give a smaller share"
            )
    return options
