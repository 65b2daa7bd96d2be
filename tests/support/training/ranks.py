"""Rank functions of tests: fits of one line, and trainings with other data, seed or loss on one rank.

Module-level, since ranks are spawned.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipelines.runner.stage import Progress
from pipelines.training.batches import Batch
from pipelines.training.fit.checkpoints import Checkpoints
from pipelines.training.fit.fitting import FitOptions, Fitted, fit
from pipelines.training.parallel.mesh import Mesh
from pipelines.training.train_decoder import TrainOptions, train_in
from tests.support.training.lines import LINE, line, numbered, task_of
from tests.unit.pipelines.conftest import CPU


def fit_line(
    checkpoints: Checkpoints, poison: float, poisoned_rank: int, epochs: int = 3, *, progress: Progress, mesh: Mesh
) -> tuple[Fitted, float]:
    """Fit y = w x to 5 in epochs of four batches of two rows; return the weight too.

    The loss of the third batch is multiplied by `poison` on one rank.
    """

    def loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
        usual = (model(torch.ones(len(batch.tokens), 1)) - 5).pow(2).mean()
        is_poisoned = batch.tokens[0, 0] == 2 and mesh.rank == poisoned_rank
        return usual * (poison if is_poisoned else 1.0), len(batch.tokens)

    model, task = line(), task_of(loss, [partial(numbered, number, 2) for number in range(4)])
    options = FitOptions(epochs=epochs, validate_every=1, descent=LINE)
    return fit(model, task, options, checkpoints, progress, None, mesh), model.weight.item()


def train_with_another(
    tokens: Path,
    options: TrainOptions,
    checkpoints: Checkpoints,
    other_rank: int,
    other: dict[str, Any],
    *,
    progress: Progress,
    mesh: Mesh,
) -> None:
    """Train a decoder over a mesh where one rank has another folder of `tokens`, or other option fields."""
    if mesh.rank == other_rank:
        tokens = other.pop("tokens", tokens)
        options = replace(options, **other)
    train_in(tokens, options, checkpoints.folder.parent, checkpoints, CPU, None, None, progress=progress, mesh=mesh)
