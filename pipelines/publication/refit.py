"""Stage 7: trains the pair that passed the gate further, on all events; the checked result serves.

    judged/          the pair that the gate judged: decoder/, student.safetensors, catalogue.parquet, and its decoder's
                     teacher/ or item_text.safetensors
    decoder/, student.safetensors, ...   the serving pair, in the layout of the stages `train` and `distill`
    refit.json       comparison of the serving pair with the judged pair

The gate cannot judge these weights: they have learned every label. They are therefore compared with the judged pair
(`find_problems`). Later starts and comparisons use the judged pair.
"""

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from models.catalogue import load_catalogue
from models.decoder.adapter import ADAPTER
from models.registry.bundle import JUDGED
from pipelines.data.examples import REFIT, Cases, Split, read_cases, sample_cases
from pipelines.evaluation.evaluate import EvaluatedModels
from pipelines.evaluation.pair import load_pair, save_pair
from pipelines.evaluation.variety import best_items
from pipelines.foreign.model import ABOUT
from pipelines.foreign.stage import copy_linked
from pipelines.runner.stage import Progress, content_key
from pipelines.scoring.metrics import Scorer, mean_ranks, ndcg
from pipelines.training.fit.checkpoints import Checkpoints
from pipelines.training.fit.memory import kept_memory
from pipelines.training.recipes import Recipe
from pipelines.training.start.warm_start import MAX_NEW_SHARE, NIGHTLY, Onward, WarmStart
from pipelines.training.train_decoder import TrainOptions, train
from pipelines.training.train_student import DistillOptions, Inputs, chosen_options, fit_and_save
from pipelines.training.workers.team import ONE, Team
from services.errors import StageFailed

_LEAST_EPOCHS, _LEAST_STEPS = 0.25, 200
"""Minimum fraction of the recipe's epochs, and minimum steps (at most all): after a few steps at a high rate a model is
worse than before."""
LEAST_IN_COMMON = 0.3
"""Minimum mean fraction of ten listed items that both pairs share; two trainings on equal data share about twice as
many."""
_FOUND = "refit.json"
_BASE = "base"
_NUM_CASES = 2_000
_BATCH = 32


def key(recipe: Recipe, distilled_key: str) -> str:
    return content_key(
        {"train": asdict(recipe.train), "distill": asdict(recipe.distill)}, [distilled_key], [sys.modules[__name__]]
    )


def refit(
    judged: EvaluatedModels,
    recipe: Recipe,
    out: Path,
    checkpoints: Checkpoints,
    progress: Progress,
    team: Team = ONE,
    base: Path | None = None,
) -> None:
    """Fit both models on all events, and write them with their comparison to the judged pair.

    An imported decoder stays as it is. An adapter continues on the serving decoder of `base`, its parent's folder.
    """
    save_pair(judged, out / JUDGED)
    serving, device = serving_pair(judged, out), judged.device
    num_events, num_known = _num_events(serving.tokenized), _num_events(judged.tokenized)

    def start(options: TrainOptions | DistillOptions) -> WarmStart:
        further = onward(num_events, num_known, options.max_batch_tokens, options.fit.epochs)
        return WarmStart(out / JUDGED, JUDGED, further)

    if judged.imported is not None:
        copy_linked(judged.decoder_dir, out / "decoder")
        shutil.copyfile(judged.decoder_dir.parent / ABOUT, out / ABOUT)
    else:
        saved, show, begun = checkpoints.of("decoder"), _part(progress, "decoder"), start(recipe.train)
        if base is not None:
            copy_linked(base / "decoder", out / _BASE / "decoder")
            shutil.copytree(judged.decoder_dir / ADAPTER, out / _BASE / "decoder" / ADAPTER)
            begun = replace(begun, folder=out / _BASE)
        train(serving.tokenized, recipe.train, out, saved, device, show, begun, team=team)
    inputs, path = Inputs(serving.tokenized, torch.get_num_threads(), device), out / "student.safetensors"
    saved, show = checkpoints.of("student"), _part(progress, "student")
    options = chosen_options(judged.students_dir, recipe.distill)
    fit_student = partial(fit_and_save, inputs, serving.decoder_dir, options, path, saved, start=start(options))
    team.of_student.fit(fit_student, saved, show)
    (out / _FOUND).write_text(json.dumps(_found(judged, serving), indent=1))


def onward(num_events: int, num_known: int, max_batch_tokens: int, epochs: int) -> Onward:
    """Return how the fit continues for `num_events` events, `num_known` of which the judged models had learned.

    With few new events, the mean of start and end holds both old and new knowledge, as in a nightly start; with many,
    it lags behind.
    """
    num_steps = epochs * max(1.0, num_events / max_batch_tokens)
    few_are_new = num_events - num_known <= MAX_NEW_SHARE * num_events
    return Onward(
        epochs=min(1.0, max(_LEAST_EPOCHS, _LEAST_STEPS / num_steps)),
        rate=NIGHTLY.rate,
        start_share=NIGHTLY.start_share if few_are_new else 0.0,
    )


def _num_events(tokenized: Path) -> int:
    return int(load_catalogue(tokenized / "catalogue.parquet").popularity.sum())


def serving_pair(judged: EvaluatedModels, refitted: Path) -> EvaluatedModels:
    """Return the folders of the pair that learned from all events, and of its training data."""
    return replace(judged, tokenized=judged.tokenized / REFIT, decoder_dir=refitted / "decoder", students_dir=refitted)


def read_found(refitted: Path) -> dict[str, Any]:
    """Read the comparison of the serving pair with the judged pair.

    {num_events, num_events_judged, models: by model {newest_loss, newest_loss_judged, newest_ndcg, newest_ndcg_judged,
    in_common, is_finite}, least_in_common}. `num_events` were learned. `newest_loss` (nats) and `newest_ndcg` (at 10)
    rank users' newest labels as served; the serving pair has learned these labels. `in_common` is the mean fraction of
    ten items that both pairs list.
    """
    about: dict[str, Any] = json.loads((refitted / _FOUND).read_text())
    return about


def describe(about: Mapping[str, Any]) -> str:
    """Return a sentence: the serving pair, its training data, and its difference from the judged pair."""
    models = " and ".join(
        f"the {name}'s lists have {row['in_common']:.0%} in common with the judged one's, the newest events' NDCG@10 "
        f"is {row['newest_ndcg']:.3f} after {row['newest_ndcg_judged']:.3f}"
        for name, row in about["models"].items()
    )
    return (
        f"refit on {about['num_events']} events; the judged models had learned {about['num_events_judged']}: {models}"
    )


def find_problems(about: Mapping[str, Any]) -> list[str]:
    """Return why these weights may not serve. Pure."""
    problems = []
    for name, row in about["models"].items():
        if not row["is_finite"]:
            problems.append(f"the {name} has weights that are not finite")
        elif not row["newest_loss"] < row["newest_loss_judged"]:
            problems.append(
                f"the {name} predicts the newest events no better than before it learned them: loss "
                f"{row['newest_loss']:.4f} after {row['newest_loss_judged']:.4f}"
            )
        elif not row["in_common"] >= about["least_in_common"]:
            problems.append(
                f"the {name}'s lists have {row['in_common']:.0%} in common with the judged model's lists, under "
                f"{about['least_in_common']:.0%}"
            )
    return problems


def refuse(about: Mapping[str, Any]) -> None:
    """Raise StageFailed if these weights may not serve."""
    if problems := find_problems(about):
        raise StageFailed(
            "refit",
            "; ".join((*problems, "nothing was published (--no-refit publishes the pair that the gate judged)")),
        )


def _found(judged: EvaluatedModels, serving: EvaluatedModels) -> dict[str, Any]:
    """Rank the newest label of some users with both pairs."""
    catalogue, cases = (
        load_catalogue(serving.tokenized / "catalogue.parquet"),
        read_cases(serving.tokenized, Split.VALID),
    )
    newest, folder = sample_cases(cases, _NUM_CASES), serving.students_dir
    before, after = load_pair(folder / JUDGED, judged.device), load_pair(folder, judged.device)
    prompt, search = judged.prompt, judged.search
    scorers, rows = after.scorers(catalogue, prompt, search), {}
    for name, scorer in before.scorers(catalogue, prompt, search).items():
        if name == "decoder" and judged.imported is not None:
            continue
        old, new = (_ranked(ranker, newest, repeats=judged.repeats) for ranker in (scorer, scorers[name]))
        rows[name] = {
            "newest_loss": new.loss,
            "newest_loss_judged": old.loss,
            "newest_ndcg": new.ndcg,
            "newest_ndcg_judged": old.ndcg,
            "in_common": in_common(old.lists, new.lists),
            "is_finite": all(bool(value.isfinite().all()) for value in after.models[name].state_dict().values()),
        }
    counts = {"num_events": _num_events(serving.tokenized), "num_events_judged": _num_events(judged.tokenized)}
    return counts | {"models": rows, "least_in_common": LEAST_IN_COMMON}


@dataclass(frozen=True, slots=True)
class _Ranked:
    """The labels of some cases ranked as served: their mean loss and NDCG@10, and each case's ten best items."""

    loss: float
    ndcg: float
    lists: list[np.ndarray]


def _ranked(scorer: Scorer, cases: Cases, *, repeats: bool) -> _Ranked:
    losses, gained, lists = [], [], []
    with kept_memory():
        for start in range(0, len(cases), _BATCH):
            histories, targets = cases.histories[start : start + _BATCH], cases.targets[start : start + _BATCH]
            for scores, history, target in zip(scorer(histories), histories, targets, strict=True):
                seen = () if repeats else history
                unmasked, masked = mean_ranks(scores, int(target), history)
                losses.append(label_loss(scores, int(target), seen))
                gained.append(unmasked if repeats else masked)
                lists.append(best_items(scores, seen))
    return _Ranked(float(np.mean(losses)), ndcg(np.array(gained), 10), lists)


def label_loss(scores: np.ndarray, target: int, seen: Sequence[int] | np.ndarray) -> float:
    """Return the cross-entropy of the label among the unseen items, in nats.

    At most that of uniform scores, also for an item without a score.
    """
    masked = scores.astype(np.float64)
    masked[np.asarray(seen, dtype=np.int64)] = -np.inf
    uniform, highest = float(np.log(len(scores))), masked.max()
    if not np.isfinite(masked[target]):
        return uniform
    return min(uniform, float(highest + np.log(np.exp(masked - highest).sum()) - masked[target]))


def in_common(lists: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> float:
    """Return the mean fraction of each list's items that are in the other list."""
    shares = [
        len(np.intersect1d(items, other)) / max(1, len(items)) for items, other in zip(lists, others, strict=True)
    ]
    return float(np.mean(shares))


def _part(progress: Progress, name: str) -> Progress:
    def show(done: int, total: int, words: str) -> None:
        progress(done, total, f"{name}: {words}")

    return show
