"""The exchange of numbers between the ranks of a mesh.

Inputs of decisions (whether a loss is usable, whether a checkpoint is due) are exchanged first, so that all ranks
decide alike and no rank waits for another that has left. All ranks must make the same calls in the same order.

Shape suffixes: N numbers of a row.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pipelines.training.batches import Batch, number_of
from pipelines.training.parallel.mesh import ONE_PROCESS, Mesh
from pipelines.training.ranges import named

_LONGEST_WAIT = timedelta(hours=6)
"""Timeout for work that only rank 0 does, such as a validation."""
_COMPARED = ("the step", "the batch", "the random numbers")


@dataclass(frozen=True, slots=True)
class LossSum:
    """One rank's part of a step: the sum of its losses, and the number of its labels."""

    total: float
    num_labels: int
    rank: int = 0


class RankGroup:
    """The ranks of a mesh, over torch's default process group. One process exchanges nothing and needs no group.

    `patient` waits for rank 0's longest work, `control` for `mesh.timeout_s`.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.patient: dist.ProcessGroup | None = None
        self.control: dist.ProcessGroup | None = None
        if mesh.world_size > 1:
            self.patient = dist.new_group(backend="gloo", timeout=_LONGEST_WAIT)
            self.wait()  # rank 0 may still be writing the previous fit
            self.control = dist.new_group(backend="gloo", timeout=timedelta(seconds=mesh.timeout_s))

    def gather(self, own_N: Tensor) -> Tensor:
        """Return every rank's numbers, one row per rank."""
        if self.mesh.world_size == 1:
            return own_N[None]
        rows = [torch.empty_like(own_N) for _ in range(self.mesh.world_size)]
        with named("communication"):
            dist.all_gather(rows, own_N, group=self.control)
        return torch.stack(rows)

    def losses(self, own: LossSum) -> list[LossSum]:
        """Return the losses of each part of the rows."""
        if self.mesh.world_size == 1:
            return [own]
        by_rank = self.gather(torch.tensor([own.total, own.num_labels], dtype=torch.float64)).tolist()
        return [LossSum(by_rank[rank][0], int(by_rank[rank][1]), rank) for rank in self.mesh.loss_ranks]

    def from_main(self, compute: Callable[[], float]) -> float:
        """Return rank 0's result of `compute`, however long it takes."""
        if self.mesh.world_size == 1:
            return compute()
        sent = torch.tensor([compute() if self.mesh.is_main else 0.0], dtype=torch.float64)
        dist.broadcast(sent, 0, group=self.patient)
        return float(sent)

    def wait(self) -> None:
        if self.mesh.world_size > 1:
            dist.barrier(group=self.patient)

    def difference(self, step: tuple[int, int], batch: Batch, rng: np.random.Generator) -> str:
        """Compare step, signed batch and random numbers of all ranks; describe the difference, empty if none.

        Otherwise a rank with another seed, file or skipped batch would go unnoticed.
        """
        if self.mesh.world_size == 1:
            return ""
        drawn = json.dumps(rng.bit_generator.state).encode() + torch.get_rng_state().numpy().tobytes()
        own = [step[0] << 32 | step[1], batch.digest, number_of(drawn)]
        seen = [tuple(row) for row in self.gather(torch.tensor(own)).tolist()]
        (usual, _), *_ = Counter(seen).most_common()  # among equally frequent rows the first, so rank 0's
        return "; ".join(
            f"rank {rank} has other values of {' and '.join(_differing(row, usual))}"
            for rank, row in enumerate(seen)
            if row != usual
        )


ONE_RANK = RankGroup(ONE_PROCESS)


def _differing(row: Sequence[int], usual: Sequence[int]) -> list[str]:
    return [name for name, own, other in zip(_COMPARED, row, usual, strict=True) if own != other]


def describe_unusable(losses: Sequence[LossSum], max_loss: float) -> str:
    """Return which ranks' losses are implausible, for a message; empty for a single process."""
    means = [(loss.total / max(1, loss.num_labels), loss.rank) for loss in losses]
    bad = [f"{mean:g} on rank {rank}" for mean, rank in means if not mean <= max_loss]
    return f" ({', '.join(bad)})" if len(losses) > 1 and bad else ""
