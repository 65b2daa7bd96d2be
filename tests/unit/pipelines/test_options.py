"""The pipeline's options: defaults, and wrong values are refused by name."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines.evaluation.gate import GateOptions
from pipelines.options import PipelineOptions
from pipelines.training.recipes import read_recipes
from services.errors import ConfigError
from services.settings.settings import Settings


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: read_recipes(epochs=0), "--epochs: 0 epochs train nothing; give at least 1"),
        (lambda: read_recipes(seed=-1), "--seed: -1 is out of range; give 0 to"),
        (lambda: GateOptions(student_floor=float("nan")), "--student-floor: nan is no share; give 0 or more"),
        (lambda: GateOptions(max_reference_loss=5), "--max-reference-loss: 5 is no share; give 0 to 1"),
        (lambda: PipelineOptions(until="lunch"), "--until: 'lunch' is no stage; the stages are ingest, "),
        (lambda: PipelineOptions(until="refit", refit=False), "--until refit: a run with --no-refit has no such stage"),
        (lambda: PipelineOptions(events=Path("e.csv")), "--events and --items: give both or none"),
    ],
)
def test_a_bad_number_names_its_option_and_the_fix(make: Callable[[], object], words: str) -> None:
    """Before anything is started."""
    with pytest.raises(ConfigError) as refused:
        make()

    assert str(refused.value).startswith(words)


def test_the_setting_of_the_llms_price_has_the_pipelines_default() -> None:
    """A benchmark, which reads no setting, routes as a stack does."""
    assert Settings().llm_price_ndcg_per_ms == PipelineOptions().llm_price_ndcg_per_ms
