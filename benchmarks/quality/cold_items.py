"""New items: the rank of labels that have no training event, among all items, and what their factors cost other labels.

    python -m benchmarks.quality cold-items --sequences FOLDER --json OUT [--state FOLDER] [--epochs N] [--users N]

The data are as for `benchmarks.quality`, leave one out, seed 0. A label is cold if its item occurs in no training
sequence. Each row ranks all unseen items: a model by itself; mixed with its sources; with the factors of new items, as
it serves; and `drafted`, where the text source proposes cold items and the decoder orders them in the places that they
have as served (SpecGR's division of work). Differences are paired, with 95 % intervals over labels.
docs/benchmarks.md explains the file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from rich.console import Console

from benchmarks.load.command import about_run, exit_on_errors, write_report
from benchmarks.quality.options import SEQUENCES, TrainingOptions, with_own_store
from benchmarks.quality.sequences import as_tables
from infra.local.store import feature_store
from models.catalogue import load_catalogue
from models.mixer import DECODER, STUDENT
from pipelines.data.examples import Cases, cases_where, sample_cases
from pipelines.data.options import SplitKind
from pipelines.declaration import Option, parsed
from pipelines.evaluation.evaluate import EvaluatedModels, model_probabilities
from pipelines.evaluation.held_out import HeldOut
from pipelines.options import PipelineOptions
from pipelines.places import Places
from pipelines.run import run_pipeline
from pipelines.scoring.metrics import Scorer, gains, interval, rank_labels
from pipelines.scoring.mixed import MixedScorer, SourceScorer, read_mixer
from pipelines.similarity.sources import TEXT
from pipelines.training.recipes import choose, data_size, read_recipes
from services.settings.settings import load_settings

_NUM_DRAFTED = 50
_CUTOFF = 10


class DraftedScorer:
    """The served mix, whose best cold items exchange their scores so that the decoder orders them."""

    def __init__(self, served: Scorer, decoder: Scorer, is_cold_V: np.ndarray) -> None:
        self._served, self._decoder, self._cold = served, decoder, np.flatnonzero(is_cold_V)

    def __call__(self, histories: Sequence[np.ndarray]) -> np.ndarray:
        """Score histories -> (B, V)."""
        scores_BV, own_BV = self._served(histories), self._decoder(histories)
        for scores_V, own_V in zip(scores_BV, own_BV, strict=True):
            drafted = self._cold[np.argsort(-scores_V[self._cold], kind="stable")[:_NUM_DRAFTED]]
            order = np.argsort(-own_V[drafted], kind="stable")
            scores_V[drafted[order]] = scores_V[drafted]
        return scores_BV


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdOptions(TrainingOptions):
    """The options of this benchmark."""

    sequences: Annotated[Path, SEQUENCES]
    users: Annotated[int, Option("Most other labels, evenly spaced.", at_least=1)] = 50_000


def main() -> None:
    """Train what the state folder lacks, rank the labels, and write the rows."""
    console = Console(stderr=True)
    with exit_on_errors():
        options = parsed(ColdOptions, __doc__)
        settings = with_own_store(load_settings(), options.state)
        places = Places.from_settings(settings)
        events, items = as_tables(options.sequences, settings.state_dir / "tables")
        chosen = PipelineOptions(
            events=events,
            items=items,
            with_live_log=False,
            split=SplitKind.LEAVE_ONE_OUT,
            recipes=read_recipes(None, epochs=options.epochs, seed=0),
            until="sources",
        )
        with feature_store(settings, console.print):
            at = {stage.stage: stage.path for stage in run_pipeline(chosen, places, console).stages}
        recipe = choose(chosen.recipes, data_size(at["tokenize"])).train
        models = EvaluatedModels(
            at["tokenize"], at["train"] / "decoder", at["distill"], recipe.max_items, recipe.stride
        )
        held_out = HeldOut(at["tokenize"], places.stages_dir, "benchmarks.quality cold-items")
        figures = measure(models, at["sources"], held_out.open("cold items"), options.users)
    about = {"dataset": options.sequences.resolve().name, "epochs": options.epochs}
    write_report(options.json, about_run("quality cold-items") | about | figures)


def measure(models: EvaluatedModels, sources: Path, cases: Cases, num_warm: int) -> dict[str, Any]:
    """Return the rows, and the number of cold and of other labels; at most `num_warm` of the others are ranked."""
    is_cold_V = load_catalogue(models.tokenized / "catalogue.parquet").popularity == 0
    is_cold_N = is_cold_V[cases.targets]
    scorers = _scorers(models, sources, is_cold_V)
    warm = sample_cases(cases_where(cases, ~is_cold_N), num_warm)
    parts = {"cold": cases_where(cases, is_cold_N), "warm": warm}
    ranks = {
        name: {part: rank_labels(scorer, own).masked for part, own in parts.items()} for name, scorer in scorers.items()
    }
    rows = [_row(name, by_part, ranks[_compared(name, scorers)]) for name, by_part in ranks.items()]
    return {"num_items": len(is_cold_V), "num_cold_items": int(is_cold_V.sum())} | {
        "num_labels": {part: len(own) for part, own in parts.items()},
        "rows": rows,
    }


def _scorers(models: EvaluatedModels, sources: Path, is_cold_V: np.ndarray) -> dict[str, Scorer]:
    mixer, by_model = (
        read_mixer(sources, load_catalogue(models.tokenized / "catalogue.parquet")),
        model_probabilities(models),
    )
    plain = replace(mixer, new_items={})
    scorers: dict[str, Scorer] = {TEXT: SourceScorer(mixer, {TEXT: 1.0}, len(is_cold_V))}
    for model in (STUDENT, DECODER):
        scorers[model] = by_model[model]
        scorers[f"{model}, mixed"] = MixedScorer(plain, model, by_model[model])
        scorers[f"{model}, served"] = MixedScorer(mixer, model, by_model[model])
        scorers[f"{model}, drafted"] = DraftedScorer(scorers[f"{model}, served"], by_model[DECODER], is_cold_V)
    return scorers


def _compared(name: str, scorers: Mapping[str, Scorer]) -> str:
    """Return the row that a row is compared with: as served with the mix, drafted with as served."""
    model = name.split(",", maxsplit=1)[0]
    other = {f"{model}, served": f"{model}, mixed", f"{model}, drafted": f"{model}, served"}.get(name, name)
    return other if other in scorers else name


def _row(name: str, ranks: Mapping[str, np.ndarray], others: Mapping[str, np.ndarray]) -> dict[str, Any]:
    row: dict[str, Any] = {"model": name}
    for part, of_part_N in ranks.items():
        recalled_N = (of_part_N <= _CUTOFF).astype(float)
        row |= {
            f"{part}_recall10": float(recalled_N.mean()),
            f"{part}_interval": list(interval(recalled_N, seed=0)),
            f"{part}_ndcg10": float(gains(of_part_N, _CUTOFF).mean()),
        }
        if ranks is not others:
            changes_N = gains(of_part_N, _CUTOFF) - gains(others[part], _CUTOFF)
            gained_N = recalled_N - (others[part] <= _CUTOFF)
            row |= {
                f"{part}_recall10_change": [float(gained_N.mean()), *interval(gained_N, seed=0)],
                f"{part}_ndcg10_change": [float(changes_N.mean()), *interval(changes_N, seed=0)],
            }
    return row


if __name__ == "__main__":
    main()
