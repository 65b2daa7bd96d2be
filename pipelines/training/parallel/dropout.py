"""Dropout that exists only during training; served models have none.

Shape suffixes: B rows of a batch, R rows of this rank, N numbers of a row.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipelines.training.parallel.mesh import Mesh


class Dropout:
    """Dropout after the outputs of some modules of one model, while they are in training mode.

    `apply` takes an output and the module's index in `modules`. A layout over several processes replaces it, so that
    all ranks draw the mask of the whole batch.
    """

    def __init__(self, modules: Iterable[nn.Module] = (), probability: float = 0.0) -> None:
        self.modules, self.probability = list(modules), probability
        self.apply: Callable[[Tensor, int], Tensor] = lambda values, _index: functional.dropout(values, probability)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Apply dropout inside this block, to copies of the model too."""

        def drop(index: int, module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
            return self.apply(output, index) if module.training else output

        handles = [module.register_forward_hook(partial(drop, index)) for index, module in enumerate(self.modules)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def drop_rows(values: Tensor, probability: float, num_rows: int, mesh: Mesh) -> Tensor:
    """Draw dropout for all rows of the batch, as a single process does, and apply this rank's rows of the mask."""
    if not probability:  # a single process draws nothing for these
        return values
    own_RN = values.reshape(len(range(num_rows)[mesh.rows]) or 1, -1)
    kept_BN = torch.empty((num_rows, own_RN.shape[1]), dtype=values.dtype, device=values.device)
    kept_BN.bernoulli_(1 - probability).div_(1 - probability)
    return (own_RN * own_rows(kept_BN, mesh)).view_as(values)


def own_rows(values_BN: Tensor, mesh: Mesh) -> Tensor:
    """Return this rank's rows; the first row for a rank without rows."""
    return values_BN[mesh.rows] if mesh.dp_rank < len(values_BN) else values_BN[:1]
