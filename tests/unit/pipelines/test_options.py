"""The pipeline's options: defaults, and errors that name invalid options."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from pipelines.codes.options import CodesOptions
from pipelines.evaluation.gate import GateOptions
from pipelines.options import PipelineOptions
from pipelines.training.options import Reporting
from pipelines.training.recipes import read_recipes
from pipelines.training.train_decoder import TrainOptions
from services.errors import ConfigError
from services.settings.settings import Settings

global_time = partial(PipelineOptions, split="global-time")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: read_recipes(epochs=0), "--epochs: 0 is out of range; give at least 1"),
        (lambda: read_recipes(seed=-1), "--seed: -1 is out of range; give at least 0"),
        (lambda: CodesOptions(depth=5), "--code-depth: 5 is out of range"),
        (lambda: GateOptions(student_floor=float("nan")), "--student-floor: nan is out of range; give at least 0"),
        (
            lambda: GateOptions(max_reference_loss=5),
            "--max-reference-loss: 5 is out of range; give at least 0 and at most 1",
        ),
        (lambda: PipelineOptions(until="lunch"), "--until: 'lunch' is unknown; give ingest, "),
        (lambda: PipelineOptions(until="refit", refit=False), "--until: --no-refit skips the stage refit; omit"),
        (lambda: PipelineOptions(events=Path("e.csv")), "--events: --items is missing"),
        (
            lambda: PipelineOptions(items=Path("i.csv"), with_live_log=False),
            "--no-live-log: --items has no events; ",
        ),
        (
            lambda: PipelineOptions(split="by-hand"),
            "--split: 'by-hand' is unknown; give leave-one-out or global-time",
        ),
        (lambda: global_time(warm_start=True), "--warm-start: the live bundle has learned from events after"),
        (lambda: global_time(force=True), "--force: a run with --split global-time publishes nothing"),
        (lambda: global_time(until="assemble"), "--until: a run with --split global-time publishes"),
        (
            lambda: PipelineOptions(device="cpu", reporting=Reporting(memory_snapshot_dir=Path("out"))),
            "--memory-snapshot: ",
        ),
        (lambda: TrainOptions(use_start=True, text_start="folder"), "use_start: true beside text_start"),
        (lambda: TrainOptions(text_layers=2), "text_layers: 2 of no checkpoint; give text_start"),
        (
            lambda: TrainOptions(text_layers=-1, text_start="folder"),
            "text_layers: -1 of no checkpoint; give text_start",
        ),
        (lambda: TrainOptions(text_size=-1), "text_size: -1 is no size; give 0"),
        (
            lambda: TrainOptions(teacher_weight=1.5),
            "teacher_weight: 1.5 is no share; give 0 for no teacher, or up to 1",
        ),
    ],
)
def test_a_bad_option_is_refused_by_its_name_with_the_fix(make: Callable[[], object], words: str) -> None:
    """Invalid numbers, stages and conflicting options are rejected before the run starts."""
    with pytest.raises(ConfigError) as refused:
        make()

    assert str(refused.value).startswith(words)


def test_the_setting_of_the_llms_price_has_the_pipelines_default() -> None:
    """Benchmarks, which do not read settings, use the same default as a stack."""
    assert Settings().llm_price_ndcg_per_ms == PipelineOptions().llm_price_ndcg_per_ms
