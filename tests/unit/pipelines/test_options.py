"""The pipeline's options: defaults, and wrong values are refused by name."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipelines.evaluation.gate import GateOptions
from pipelines.options import PipelineOptions, decoder_recipe, student_recipe
from pipelines.training.distill import DistillOptions
from pipelines.training.train import TrainOptions
from services.errors import ConfigError


@pytest.mark.parametrize(("recipe", "default"), [(decoder_recipe, TrainOptions()), (student_recipe, DistillOptions())])
def test_epochs_and_seed_change_nothing_else(recipe: Callable[..., Any], default: Any) -> None:
    """Without options the recipe is the default one, whose outputs earlier runs have cached."""
    assert recipe(None, 0) == default
    assert recipe(3, 7) == replace(default, seed=7, fit=replace(default.fit, epochs=3))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: decoder_recipe(0, 0), "--epochs: 0 epochs train nothing; give at least 1"),
        (lambda: decoder_recipe(None, -1), "--seed: -1 is out of range; give 0 to"),
        (lambda: GateOptions(min_student_share=float("nan")), "--min-student-share: nan is no share; give 0 or more"),
        (lambda: PipelineOptions(until="lunch"), "--until: 'lunch' is no stage; the stages are ingest, "),
        (lambda: PipelineOptions(events=Path("e.csv")), "--events and --items: give both or none"),
    ],
)
def test_a_bad_number_names_its_option_and_the_fix(make: Callable[[], object], words: str) -> None:
    """Before anything is started."""
    with pytest.raises(ConfigError) as refused:
        make()

    assert str(refused.value).startswith(words)
