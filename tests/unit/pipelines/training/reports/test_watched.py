"""Reports of a running fit, and rejected reporting options."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipelines.runner.stage import silent
from pipelines.training.fit.checkpoints import Checkpoints
from pipelines.training.options import Reporting
from pipelines.training.reports.tensorboard import TensorBoardFiles
from pipelines.training.reports.watched import flat, refuse_unreportable
from pipelines.training.train_decoder import read_training, train
from services.errors import ConfigError
from tests.unit.pipelines.conftest import CPU, SMALL_DECODER, Built


def read_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return all scalars in a folder by name with TensorBoard's own reader, as (step, value)."""
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    return {name: [(scalar.step, scalar.value) for scalar in reader.Scalars(name)] for name in reader.Tags()["scalars"]}


def test_tensorboard_reads_every_step_and_validation_of_a_training(built: Built, tmp_path: Path) -> None:
    """TensorBoard reads the losses and validations of training.json for all steps."""
    saved = Checkpoints(tmp_path / "saved", "train", 60, Reporting(run="train-1", tensorboard_dir=tmp_path / "runs"))
    train(built.trained.tokenized, SMALL_DECODER, tmp_path, saved, CPU, silent)

    scalars, trained = read_scalars(tmp_path / "runs" / "train-1"), read_training(tmp_path)
    assert [value for _, value in scalars["loss"]] == pytest.approx(trained["losses"]["means"], rel=1e-5)
    assert [step for step, _ in scalars["loss"]] == list(range(1, len(scalars["loss"]) + 1))
    assert scalars["validation"] == [
        (point["step"], pytest.approx(point["validation"], rel=1e-5)) for point in trained["curve"]
    ]
    assert {"learning_rate", "gradient_norm", "tokens_per_s"} <= scalars.keys()


def test_steps_that_come_again_replace_those_before(tmp_path: Path) -> None:
    """After a return to a checkpoint or a restart, each step has its latest value."""
    with TensorBoardFiles(tmp_path) as files:
        for step in (1, 2, 3, 4, 3, 4, 5):
            files.measured(step, {"loss": 1.0 * step})
    with TensorBoardFiles(tmp_path) as files:
        for step in (4, 5, 6):
            files.measured(step, {"loss": 2.0 * step})

    assert read_scalars(tmp_path)["loss"] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 8.0), (5, 10.0), (6, 12.0)]


@pytest.mark.parametrize(
    ("reporting", "words"),
    [
        (Reporting(memory_snapshot_dir=Path("out")), r"--memory-snapshot: .*on the cpu; leave the option out, or"),
        (Reporting(mlflow_uri="file:./mlruns"), r"--mlflow \(MLFLOW_TRACKING_URI\): 'file:./mlruns' is no tracking"),
        (
            Reporting(tensorboard_dir=Path("x")),
            r"--tensorboard: its files need the package tensorboard; run pip install 'tailrace\[tensorboard\]'",
        ),
    ],
)
def test_what_cannot_be_reported_is_refused_with_its_option(
    reporting: Reporting, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options are rejected before training, also without TensorBoard's package."""
    monkeypatch.setitem(sys.modules, "tensorboard", None)

    with pytest.raises(ConfigError, match=words):
        refuse_unreportable(reporting, torch.device("cpu"))


def test_nested_options_are_reported_by_their_path() -> None:
    """Options are flattened to dotted names, and the run's name includes its parts."""
    assert flat({"fit": {"descent": {"learning_rate": 0.1}}, "seed": 3}) == {
        "fit.descent.learning_rate": "0.1",
        "seed": "3",
    }
    assert replace(Reporting(run="distill-1"), mlflow_uri="x").of("twin").run == "distill-1/twin"
