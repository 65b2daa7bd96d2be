"""The recipe search uses only validation labels, and resumes after a kill."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import optuna
import polars as pl
import pytest

from pipelines.codes.tokenize import tokenize
from pipelines.data.examples import REFIT, Split
from pipelines.search import as_toml, search, varied, without_test_labels
from pipelines.training.fit.descent import DescentOptions
from pipelines.training.fit.fitting import FitOptions
from pipelines.training.recipes import Recipe, read_recipes
from pipelines.training.train_decoder import TrainOptions
from tests.support.training.killed_fit import kill_before
from tests.support.training.synthetic import histories_from, write_ingested

FIT = FitOptions(
    epochs=4, validate_every=1, descent=DescentOptions(learning_rate=2e-2, weight_decay=0.1, warm_up=0.1, average=0.9)
)
BASE = Recipe(train=TrainOptions(max_items=10, stride=5, fit=FIT))


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens of the ring."""
    folder = tmp_path_factory.mktemp("search")
    (folder / "tokens").mkdir()
    ingested = write_ingested(folder / "ingest")
    tokenize(ingested, histories_from(ingested), 1_000, folder / "tokens")
    return folder / "tokens"


def test_the_search_has_no_test_label(tokens: Path, tmp_path: Path) -> None:
    """The search's data has all training and validation rows, no test rows, and no refit rows."""
    whole = pl.read_parquet(tokens / "examples.parquet")

    copied = pl.read_parquet(without_test_labels(tokens, tmp_path / "copy") / "examples.parquet")

    assert Split.TEST in whole["split"]
    assert copied.equals(whole.filter(pl.col("split") != Split.TEST))
    assert {path.name for path in tokens.iterdir()} - {path.name for path in (tmp_path / "copy").iterdir()} == {REFIT}


def test_a_killed_search_goes_on(tokens: Path, tmp_path: Path) -> None:
    """After SIGKILL in the second trial the first stays, the second repeats its values, and all trials are made."""
    child = [sys.executable, "-m", "tests.integration.pipelines.test_search", str(tokens), str(tmp_path)]
    killed = subprocess.run(child, check=False)
    first = search(tokens, BASE, tmp_path, 1)
    broken = first.get_trials(states=(optuna.trial.TrialState.RUNNING, optuna.trial.TrialState.FAIL))

    study = search(tokens, BASE, tmp_path, 3)

    ended = study.get_trials(states=(optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED))
    assert killed.returncode == -signal.SIGKILL
    assert len(ended) == 3
    assert ended[0].params == first.trials[0].params
    assert ended[0].value == first.trials[0].value
    assert ended[1].params == broken[0].params
    assert study.best_value == max(trial.value or 0.0 for trial in ended)


def test_the_first_trial_is_the_recipe_and_the_best_can_be_given_to_the_pipeline(tokens: Path, tmp_path: Path) -> None:
    """The printed recipe reads back as the same options."""
    study = search(tokens, BASE, tmp_path, 1)
    best = replace(BASE, name="searched", train=replace(varied(BASE.train, study.best_trial), num_layers=3))

    (tmp_path / "recipes.toml").write_text("\n".join(as_toml(best)))
    (read,) = read_recipes(tmp_path / "recipes.toml")

    assert varied(BASE.train, study.trials[0]) == BASE.train
    assert read == best


if __name__ == "__main__":
    kill_before(FIT.epochs + 2)  # a step is an epoch
    search(Path(sys.argv[1]), BASE, Path(sys.argv[2]), 3)
    os._exit(1)
