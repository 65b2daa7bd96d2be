"""Fits of one line, for tests of a fit's surrounding steps."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from pipelines.training.batches import Batch, MakeBatch
from pipelines.training.fit.descent import DescentOptions
from pipelines.training.fit.fitting import LossFunction, Task

LINE = DescentOptions(learning_rate=0.1, weight_decay=0.0, warm_up=0.1, average=0.9)


def line() -> nn.Linear:
    """A model of one weight with a fixed initial value."""
    torch.manual_seed(0)
    return nn.Linear(1, 1, bias=False)


def numbered(number: int, num_rows: int = 1) -> Batch:
    """A batch of rows of one position with this token."""
    tokens, labels = torch.full((num_rows, 1), number), torch.zeros(num_rows, 1, dtype=torch.long)
    return Batch(tokens, labels, torch.ones(num_rows, 1).bool(), (1,) * num_rows)


def task_of(
    loss: LossFunction,
    batches: Sequence[MakeBatch],
    validate: Callable[[], float] = lambda: 0.5,
    uniform_loss: float = 100.0,
) -> Task:
    """Learn these batches in each epoch."""
    rng = np.random.default_rng(0)
    return Task(batches=lambda: batches, rng=rng, loss=loss, validate=validate, uniform_loss=uniform_loss)
