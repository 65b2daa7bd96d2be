"""Warm start: the fractions of a full training's NDCG@10 and time with a start from an earlier training.

    python -m benchmarks.quality warm-start --json OUT [--state FOLDER] [--sequences FOLDER] [--seeds 3] [--epochs N]

Default data: ml-100k; `--sequences` is a folder as described in benchmarks/quality/sequences.py. For each of two
fractions of new events, a live decoder and student are trained without that fraction of each user's newest training
events. Both are then trained on all events twice: from scratch (`whole`), and from the live models as in the nightly
pipeline (`warm`), with the pipeline's recipe for this data. NDCG@10 as served is given for test labels, and for
validation labels, by which a full training also chose its best epoch; each user's value is the mean over the seeds.
`kept` is warm over whole, with the paired 95 % bootstrap interval over users. Times are processor time on one thread.
"""

import json
import shutil
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

from benchmarks.load.command import about_run, exit_on_errors, write_report
from benchmarks.quality.options import SeededOptions, with_own_store
from benchmarks.quality.sequences import as_tables
from infra.local.store import feature_store
from models.catalogue import load_catalogue
from models.decoder.weights import load_decoder
from models.prompt import Prompt
from models.student import read_student
from pipelines.data.examples import Split, read_cases, read_split
from pipelines.declaration import parsed
from pipelines.options import PipelineOptions
from pipelines.places import Places
from pipelines.run import run_pipeline
from pipelines.runner.stage import Progress
from pipelines.scoring.beams import decoder_scorer
from pipelines.scoring.metrics import Scorer, gains, interval, rank_labels
from pipelines.scoring.student import StudentScorer
from pipelines.training.fit.checkpoints import Checkpoints
from pipelines.training.recipes import Recipe, choose, data_size, read_recipes
from pipelines.training.start.warm_start import WarmStart
from pipelines.training.train_decoder import read_training, train
from pipelines.training.train_student import Inputs, fit_and_save
from services.errors import StageFailed
from services.settings.settings import load_settings

_TIMES = "cpu_s.json"
_CHECKPOINT_EVERY_S = 60.0


def fit_pair(tokenized: Path, recipe: Recipe, out: Path, console: Console, start: WarmStart | None = None) -> None:
    """Train both unless the folder has them. Raises StageFailed if the start model is refused."""
    if (out / _TIMES).exists():
        return
    shutil.rmtree(out, ignore_errors=True)
    device, began_s, show = torch.device("cpu"), time.process_time(), _shown_on(console, out.name)
    saved = Checkpoints(out / "saved" / "decoder", "train", _CHECKPOINT_EVERY_S)
    train(tokenized, recipe.train, out, saved, device, show, start)
    if start is not None and read_training(out)["started_from"] is None:
        raise StageFailed("train", f"the start from {start.version} was refused; the log says why")
    decoder_s = time.process_time() - began_s
    saved = Checkpoints(out / "saved" / "student", "distill", _CHECKPOINT_EVERY_S)
    inputs, path = Inputs(tokenized, 1, device), out / "student.safetensors"
    fit_and_save(inputs, out / "decoder", recipe.distill, path, saved, show, start)
    shutil.copyfile(tokenized / "catalogue.parquet", out / "catalogue.parquet")
    spent_s = {"decoder": decoder_s, "student": time.process_time() - began_s - decoder_s}
    (out / _TIMES).write_text(json.dumps(spent_s))


def scorers_of(out: Path, recipe: Recipe) -> dict[str, Scorer]:
    """Return rankers for the `decoder` and `student` that `fit_pair` wrote."""
    catalogue, decoder = load_catalogue(out / "catalogue.parquet"), load_decoder(out / "decoder", torch.float32, "cpu")
    return {
        "decoder": decoder_scorer(decoder, catalogue, Prompt(recipe.train.max_items, recipe.train.stride)),
        "student": StudentScorer(read_student(out / "student.safetensors")),
    }


def cpu_s_of(out: Path) -> dict[str, float]:
    """Return the processor time of each model's training."""
    spent_s: dict[str, float] = json.loads((out / _TIMES).read_text())
    return spent_s


def _shown_on(console: Console, what: str) -> Progress:
    def show(done: int, total: int, words: str) -> None:
        console.print(f"{what}: {done} of {total} epochs, {words}", markup=False)

    return show


_SPLITS = {"test": Split.TEST, "validation": Split.VALID}
_NEW_SHARES = (0.005, 0.02)
_KINDS = ("live", "whole", "warm")


def main() -> None:
    """Train everything that the state folder lacks, rank the labels, and write the file."""
    console = Console(stderr=True)
    torch.set_num_threads(1)
    with exit_on_errors():
        options = parsed(SeededOptions, __doc__)
        tokenized, state = tokenize(options.sequences, options.state, console)
        state = state / "warm" / tokenized.name
        runs = list(_runs(tokenized, state, options, console))
    write_report(options.json, about_run("quality warm-start") | summarise(runs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A decoder with its student: each case's NDCG@10 by (model, split), and each model's processor time."""

    ndcg: dict[tuple[str, str], np.ndarray]
    cpu_s: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartRun:
    """The three trainings of one seed and one fraction of new events."""

    new_share: float
    seed: int
    live: Trained
    whole: Trained
    warm: Trained


def without_newest(tokenized: Path, share: float, out: Path) -> None:
    """Write the stage's folder without this fraction of each training history's newest events.

    The event after the remaining events validates. Fractional events are rounded at random, so that short histories
    lose their fraction too.
    """
    shutil.copytree(tokenized, out, dirs_exist_ok=True)
    rng, rows = np.random.default_rng(0), []
    examples = pl.read_parquet(tokenized / "examples.parquet")
    for row in examples.filter(pl.col("split") == Split.TRAIN).iter_rows(named=True):
        items, weights = row["history"], row["weights"]
        kept = int(len(items) * (1 - share) + rng.random())
        known = row | {name: row[name] and row[name][:kept] for name in ("history", "weights", "counts")}
        known["dislikes"] = row["dislikes"] and [dislike for dislike in row["dislikes"] if dislike["place"] < kept]
        if kept:
            rows.append(known)
        if 2 <= kept < len(items) and (weights is None or weights[kept]):
            none = dict.fromkeys(("weights", "counts", "dislikes"))
            rows.append(known | {"split": Split.VALID, "target": items[kept]} | none)
    pl.DataFrame(rows, schema=examples.schema).write_parquet(out / "examples.parquet")
    catalogue = load_catalogue(tokenized / "catalogue.parquet")
    learned = np.concatenate([row["history"] for row in rows if row["split"] == Split.TRAIN])
    popularity = np.bincount(learned, minlength=len(catalogue.item_ids)).astype(np.float64)
    replace(catalogue, popularity=popularity).save(out / "catalogue.parquet")


def judge(tokenized: Path, recipe: Recipe, folder: Path) -> Trained:
    """Rank the labels of both splits with the models of `fit_pair`."""
    repeats = bool(read_split(tokenized)["repeats"])
    cases = {name: read_cases(tokenized, split) for name, split in _SPLITS.items()}
    ndcg = {
        (model, name): gains(rank_labels(scorer, of_split).as_served(repeats=repeats), 10)
        for model, scorer in scorers_of(folder, recipe).items()
        for name, of_split in cases.items()
    }
    return Trained(ndcg=ndcg, cpu_s=cpu_s_of(folder))


def summarise(runs: list[WarmStartRun]) -> dict[str, Any]:
    """Return `rows` by fraction, model and split, and `times` by fraction and model, over all seeds."""
    rows, times = [], []
    for new_share in dict.fromkeys(run.new_share for run in runs):
        of_share = [run for run in runs if run.new_share == new_share]
        for model, split in of_share[0].whole.ndcg:
            by_user = {
                kind: np.mean([getattr(run, kind).ndcg[model, split] for run in of_share], axis=0) for kind in _KINDS
            }
            mean = {kind: float(gained.mean()) for kind, gained in by_user.items()}
            difference = interval(by_user["warm"] - by_user["whole"], seed=0)
            pairs = [(run.warm.ndcg[model, split], run.whole.ndcg[model, split]) for run in of_share]
            rows.append(
                {"new_share": new_share, "model": model, "split": split, **mean, "kept": mean["warm"] / mean["whole"]}
                | {"ci95": [1 + bound / mean["whole"] for bound in difference]}
                | {"kept_by_seed": [float(warm.mean() / whole.mean()) for warm, whole in pairs]}
                | {"num_users": len(by_user["whole"])}
            )
        for model in ("decoder", "student"):
            whole_s, warm_s = (fmean(getattr(run, kind).cpu_s[model] for run in of_share) for kind in ("whole", "warm"))
            times.append(
                {"new_share": new_share, "model": model, "whole_cpu_s": whole_s, "warm_cpu_s": warm_s}
                | {"share_of_time": warm_s / whole_s}
            )
    return {"num_seeds": len({run.seed for run in runs}), "rows": rows, "times": times}


def _runs(tokenized: Path, state: Path, options: SeededOptions, console: Console) -> Iterator[WarmStartRun]:
    """Yield the trainings of each seed and fraction; a seed's full training is run and evaluated once."""
    before = {share: state / f"without-{share}" for share in _NEW_SHARES}
    for share, folder in before.items():
        without_newest(tokenized, share, folder)
    for seed in range(options.seeds):
        recipes = read_recipes(epochs=options.epochs, student_epochs=options.epochs, seed=seed)
        recipe = choose(recipes, data_size(tokenized))  # for the live model too: a warm start needs the same shape

        def trained(data: Path, name: str, start: WarmStart | None = None, recipe: Recipe = recipe) -> Trained:
            fit_pair(data, recipe, state / name, console, start)
            return judge(tokenized, recipe, state / name)

        whole = trained(tokenized, f"whole-{seed}")
        for share, earlier in before.items():
            live = trained(earlier, f"live-{share}-{seed}")
            start = WarmStart(state / f"live-{share}-{seed}", "live")
            warm = trained(tokenized, f"warm-{share}-{seed}", start)
            yield WarmStartRun(new_share=share, seed=seed, live=live, whole=whole, warm=warm)


def tokenize(sequences: Path | None, state: Path | None, console: Console) -> tuple[Path, Path]:
    """Run the pipeline up to its tokens, with a separate store. Return the folders of the stage and of the run."""
    settings = with_own_store(load_settings(), state)
    events = items = None
    if sequences is not None:
        events, items = as_tables(sequences, settings.state_dir / "tables")
    chosen = PipelineOptions(events=events, items=items, with_live_log=False, until="tokenize")
    with feature_store(settings, console.print):
        report = run_pipeline(chosen, Places.from_settings(settings), console)
    return report.stages[-1].path, settings.state_dir
