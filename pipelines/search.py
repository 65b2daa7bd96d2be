"""Searches the decoder's recipe, using only the validation labels.

    python -m pipelines.search --trials N [--tokenized FOLDER] [--recipes FILE] [--epochs N] [--device auto] [--seed 0]

The data is the output of the last `tailrace pipeline` in the state folder (`--until tokenize` is enough), or
`--tokenized`. The search works on a copy without the test labels, and removes it at the end. The first trial is the
recipe that the pipeline would use, from `--recipes`; a trial that validates below the median of earlier trials at the
same epoch ends early. Trials are kept in the state folder, so a killed search resumes, also within a trial, until N
trials have ended. The best recipe is printed as TOML for `tailrace pipeline --recipes FILE`.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import polars as pl
import torch
from rich.console import Console

from pipelines.data.examples import REFIT, Split
from pipelines.declaration import Option, check_bounds, parsed
from pipelines.runner.run_lock import run_lock
from pipelines.runner.stage import content_key, silent
from pipelines.training import recipes, train_decoder
from pipelines.training.fit.checkpoints import Checkpoints
from pipelines.training.fit.device import choose_device
from pipelines.training.options import DEVICE_HELP, DecoderRecipeOptions, DeviceChoice
from pipelines.training.recipes import Recipe
from pipelines.training.train_decoder import TrainOptions
from pipelines.training.train_student import DistillOptions
from services.errors import ConfigError, StageFailed, TailraceError
from services.settings.settings import load_settings
from services.stream.erasure.tables import SCRATCH

if TYPE_CHECKING:
    import optuna

_CHECKPOINT_EVERY_S = 60.0
_HEAD_SIZE, _WIDENING = 32, 2.5
"""Of shapes other than the recipe's: numbers of a head, and of the feed-forward layer for each hidden one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """The trials of a search, their data and the first recipe."""

    trials: Annotated[int, Option("Number of ended trials to reach, including earlier runs.", at_least=1)]
    tokenized: Annotated[Path | None, Option("Output of the stage tokenize.", shown="the last in the state folder")] = (
        None
    )
    device: Annotated[str, Option(DEVICE_HELP, choices=tuple(DeviceChoice))] = DeviceChoice.AUTO
    recipes: DecoderRecipeOptions = field(default_factory=DecoderRecipeOptions)

    def __post_init__(self) -> None:
        """Validate the options. Raises ConfigError naming the option."""
        check_bounds(self)


def main() -> None:
    """Search, and print the best recipe."""
    torch.set_num_threads(1)  # as the pipeline
    try:
        options = parsed(SearchOptions, __doc__)
        stages_dir = load_settings().stages_dir
        tokenized, folder = options.tokenized or _newest(stages_dir / "tokenize"), stages_dir / "search"
        given = recipes.recipes_of(options.recipes)
        base = recipes.choose(given, recipes.data_size(tokenized))
        with run_lock(folder, Console(stderr=True)):
            study = search(tokenized, base, folder, options.trials, choose_device(options.device))
    except TailraceError as error:
        sys.exit(f"error: {error}")
    sys.stderr.write(f"best of {len(study.trials)} trials: validation NDCG@10 {study.best_value:.4f}\n")
    best = replace(base, name="searched", train=varied(base.train, study.best_trial))
    sys.stdout.write("\n".join(as_toml(best)) + "\n")


def search(
    tokenized: Path, base: Recipe, folder: Path, num_trials: int, device: torch.device | None = None
) -> "optuna.Study":
    """Run trials until `num_trials` have ended.

    `folder` keeps all searches, by data, recipe and training code.
    """
    import optuna
    from optuna.trial import TrialState

    own = folder / content_key(asdict(base), [str(tokenized.resolve())], [train_decoder])
    own.mkdir(parents=True, exist_ok=True)
    data = without_test_labels(tokenized, folder / SCRATCH / own.name)
    study = optuna.create_study(
        storage=f"sqlite:///{own / 'trials.db'}",
        study_name="decoder",
        load_if_exists=True,
        direction="maximize",
        pruner=optuna.pruners.MedianPruner(),
    )
    # seeded by the number of trials, so that a resumed search draws new recipes
    study.sampler = optuna.samplers.TPESampler(seed=len(study.trials))
    if not study.trials:
        study.enqueue_trial(_values(base.train))
    for killed in study.get_trials(states=(TrialState.RUNNING,)):
        study.enqueue_trial(killed.params)
        study.tell(killed.number, state=TrialState.FAIL)
    num_ended = len(study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED)))
    run = _Run(data, base.train, own, device or torch.device("cpu"))
    study.optimize(run.score, n_trials=max(0, num_trials - num_ended))
    shutil.rmtree(data)
    return study


def without_test_labels(tokenized: Path, out: Path) -> Path:
    """Copy what training reads before the gate, without the rows of the test split, and return the copy."""
    shutil.copytree(tokenized, out, dirs_exist_ok=True, ignore=shutil.ignore_patterns("examples.parquet", REFIT))
    rows = pl.read_parquet(tokenized / "examples.parquet")
    rows.filter(pl.col("split").is_in([Split.TRAIN, Split.VALID])).write_parquet(out / "examples.parquet")
    return out


@dataclass(frozen=True, slots=True)
class _Run:
    """Trains one trial after another. A trial's fit is kept by its options until it has ended."""

    data: Path
    base: TrainOptions
    folder: Path
    device: torch.device

    def score(self, trial: "optuna.Trial") -> float:
        """Return the best validation of a fit. Raises TrialPruned, also where the fit cannot be ended."""
        import optuna

        options = varied(self.base, trial)
        out = self.folder / content_key(asdict(options))
        out.mkdir(exist_ok=True)

        def report(epoch: int, validation: float) -> None:
            trial.report(validation, epoch)
            if trial.should_prune():
                raise optuna.TrialPruned

        saved = Checkpoints(out / "checkpoints", "search", _CHECKPOINT_EVERY_S)
        try:
            train_decoder.train(self.data, options, out, saved, self.device, silent, on_validation=report)
        except (StageFailed, optuna.TrialPruned) as ended:
            shutil.rmtree(out)
            raise optuna.TrialPruned(str(ended)) from ended
        best: float = max(point["validation"] for point in train_decoder.read_training(out)["curve"])
        shutil.rmtree(out)
        return best


def varied(base: TrainOptions, trial: "optuna.Trial | optuna.trial.FrozenTrial") -> TrainOptions:
    """Return the options of a trial. The prompt, the epochs and whether items have text stay as they are."""

    def one_of(name: str, *values: int) -> int:
        return int(trial.suggest_categorical(name, sorted({*values, getattr(base, name)})))

    hidden_size = one_of("hidden_size", 32, 64, 128)
    if hidden_size != base.hidden_size:
        heads, wide = max(1, hidden_size // _HEAD_SIZE), int(_WIDENING * hidden_size)
        base = replace(base, hidden_size=hidden_size, num_heads=heads, feed_forward=wide)
    descent = replace(
        base.fit.descent,
        learning_rate=trial.suggest_float("learning_rate", 5e-4, 2e-2, log=True),
        weight_decay=trial.suggest_float("weight_decay", 1e-3, 1.0, log=True),
        warm_up=trial.suggest_float("warm_up", 0.01, 0.3),
    )
    return replace(
        base,
        num_layers=trial.suggest_int("num_layers", 1, 4),
        dropout=trial.suggest_float("dropout", 0.0, 0.6),
        max_batch_tokens=one_of("max_batch_tokens", 512, 1_024, 2_048, 4_096),
        sample_items=one_of("sample_items", 1_024, 2_048, 4_096) if base.sample_items else 0,
        text_size=one_of("text_size", 64, 128, 256) if base.text_size else 0,
        fit=replace(base.fit, descent=descent),
    )


def _values(base: TrainOptions) -> dict[str, Any]:
    """Return what `varied` asks for so that it gives this recipe."""
    values = asdict(base) | asdict(base.fit.descent)
    names = ("hidden_size", "learning_rate", "weight_decay", "warm_up", "num_layers", "dropout", "max_batch_tokens")
    asked = names + tuple(name for name in ("sample_items", "text_size") if values[name])
    return {name: values[name] for name in asked}


def as_toml(recipe: Recipe) -> Iterator[str]:
    """Yield the lines of a recipe file with only this recipe."""
    yield from ("[[recipe]]", f"name = {json.dumps(recipe.name)}")
    yield from _changes("decoder", TrainOptions(), replace(recipe.train, mask_seen=True))  # decided by the data
    yield from _changes("student", DistillOptions(), replace(recipe.distill, mask_seen=True))


def _changes(name: str, default: Any, given: Any) -> Iterator[str]:
    """Yield a dotted key for each value that is not the default."""
    for option in fields(default):
        before, value = getattr(default, option.name), getattr(given, option.name)
        if is_dataclass(before):
            yield from _changes(f"{name}.{option.name}", before, value)
        elif value != before:
            yield f"{name}.{option.name} = {json.dumps(value)}"


def _newest(stage: Path) -> Path:
    """Return the output of this stage that was used last. Raises ConfigError."""
    paths = [path for path in stage.glob("[!.]*") if path.is_dir()]
    if not paths:
        raise ConfigError(f"--tokenized: nothing in {stage}; run `tailrace pipeline --until tokenize` first")
    return max(paths, key=lambda path: path.stat().st_mtime)


if __name__ == "__main__":
    main()
