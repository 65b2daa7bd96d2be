"""Trainings over several workers, complete or stopped midway."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.runner.stage import silent
from pipelines.training.fit.checkpoints import Checkpoints
from pipelines.training.train_decoder import TrainOptions, train
from pipelines.training.workers.team import Team
from tests.unit.pipelines.conftest import CPU, DROPPED_DECODER

TWO = Team(workers=2, timeout_s=60)
LONG = replace(DROPPED_DECODER, fit=replace(DROPPED_DECODER.fit, epochs=24, validate_every=8))
Undisturbed = Callable[..., tuple[Path, dict[str, float]]]


def saved_in(folder: Path, every_s: float = 60.0) -> Checkpoints:
    return Checkpoints(folder / "saved", "train", every_s)


def trained(
    tokens: Path, options: TrainOptions, out: Path, team: Team = TWO, every_s: float = 60.0
) -> dict[str, float]:
    """Train over these workers, and return the losses by epoch."""
    out.mkdir(exist_ok=True)
    train(tokens, options, out, saved_in(out, every_s), CPU, silent, team=team)
    return {str(point["epoch"]): point["loss"] for point in json.loads((out / "training.json").read_text())["curve"]}


class Stopped(Exception):
    """Raised by a test's progress callback."""


def stop_after(epoch: int, tokens: Path, options: TrainOptions, out: Path, team: Team) -> None:
    """Train until this epoch is done, then stop from outside."""

    def stop(done: int, _total: int, _words: str) -> None:
        if done == epoch:
            raise Stopped

    with pytest.raises(Stopped):
        train(tokens, options, out, saved_in(out, 0.0), CPU, stop, team=team)


def pids_of(logged: list[dict[str, object]]) -> list[int]:
    """Return the process IDs of the last started ranks."""
    return [int(str(line["pid"])) for line in logged if line["event"] == "worker_started"][-2:]
