"""What ranks do in tests: fits of one line, and trainings whose data, seed or loss differs on one rank. Module-level, since ranks are spawned."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from pipelines.runner.stage import Progress
from pipelines.training.fit.batches import Batch
from pipelines.training.fit.checkpoints import Checkpoints
from pipelines.training.fit.descent import DescentOptions
from pipelines.training.fit.fitting import FitOptions, Fitted, Task, fit
from pipelines.training.fit.parallel import Group
from pipelines.training.train_decoder import TrainOptions, train_in
from tests.unit.pipelines.conftest import CPU

LINE = DescentOptions(learning_rate=0.1, weight_decay=0.0, warm_up=0.1, average=0.9)


def fit_line(
    checkpoints: Checkpoints, poison: float, poisoned_rank: int, epochs: int = 3, *, progress: Progress, group: Group
) -> tuple[Fitted, float]:
    """Fit y = w x to 5 in epochs of four batches of two rows; the loss of the third batch is multiplied by `poison` on one rank. Return the weight too."""
    batches = [
        partial(
            Batch,
            torch.full((2, 1), number),
            torch.zeros(2, 1, dtype=torch.long),
            torch.ones(2, 1).bool(),
            (1, 1),
        )
        for number in range(4)
    ]

    def loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
        usual = (model(torch.ones(len(batch.tokens), 1)) - 5).pow(2).mean()
        is_poisoned = batch.tokens[0, 0] == 2 and group.rank == poisoned_rank
        return usual * (poison if is_poisoned else 1.0), len(batch.tokens)

    torch.manual_seed(0)
    line = nn.Linear(1, 1, bias=False)
    task = Task(
        batches=lambda: batches, rng=np.random.default_rng(0), loss=loss, validate=lambda: 0.5, uniform_loss=100.0
    )
    fitted = fit(
        line, task, FitOptions(epochs=epochs, validate_every=1, descent=LINE), checkpoints, progress, None, group
    )
    return fitted, line.weight.item()


def train_with_another(
    tokens: Path,
    options: TrainOptions,
    checkpoints: Checkpoints,
    other_rank: int,
    other: dict[str, Any],
    *,
    progress: Progress,
    group: Group,
) -> None:
    """Train a decoder over a group of which one rank has another folder of `tokens`, or other fields of the options."""
    if group.rank == other_rank:
        tokens = other.pop("tokens", tokens)
        options = replace(options, **other)
    train_in(tokens, options, checkpoints.folder.parent, checkpoints, CPU, None, None, progress=progress, group=group)
