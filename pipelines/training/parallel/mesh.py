"""The mesh of the processes that fit one model: the rows and the part of the model of each rank. Pure.

The ranks form an array (pipeline, data, shard, tensor), the last dimension varying fastest. Ranks that differ only
along `pipeline` or `tensor` learn from the same rows.
"""

from dataclasses import dataclass, field, replace

import torch

from pipelines.planner.mesh import ParallelLayout
from pipelines.training.options import BUCKET_MB, Compression, Recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How a step is computed, on one process or many.

    `is_bf16`: whether matrix products run in bf16 with fp32 weights; None: on a GPU. `recompute`: activations
    recomputed in the backward pass (`recompute.py`). `bucket_mb` and `compression` apply to gradients that DDP
    averages. `accumulation` multiplies the number of parts into which each batch is split.
    """

    is_bf16: bool | None = None
    recompute: str = Recompute.NONE
    bucket_mb: float = BUCKET_MB
    compression: str = Compression.NONE
    accumulation: int = 1

    def uses_bf16(self, device: torch.device) -> bool:
        """Whether matrix products on this device run in bf16 with fp32 weights."""
        return device.type == "cuda" if self.is_bf16 is None else self.is_bf16


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The layout of all processes, and this process's rank in it. By default one process.

    `local_rank` numbers the processes of one machine. A rank that does not answer within `timeout_s` of a step counts
    as lost.
    """

    layout: ParallelLayout = field(default_factory=ParallelLayout)
    rank: int = 0
    local_rank: int = 0
    timeout_s: float = 600.0
    method: Method = field(default_factory=Method)

    @property
    def world_size(self) -> int:
        return self.layout.num_gpus

    @property
    def is_main(self) -> bool:
        """Whether this process validates, writes files and reports progress."""
        return self.rank == 0

    @property
    def is_divided(self) -> bool:
        """Whether each process holds only a part of the model."""
        return self.layout.shard * self.layout.tensor * self.layout.pipeline > 1

    @property
    def dp_size(self) -> int:
        """Number of parts into which the rows of a batch are divided."""
        return self.layout.data * self.layout.shard

    @property
    def dp_rank(self) -> int:
        """Index of this rank's part of the rows."""
        return self.rank // self.layout.tensor % self.dp_size

    @property
    def tp_rank(self) -> int:
        """Index of this rank's part of each tensor-parallel product."""
        return self.rank % self.layout.tensor

    @property
    def pp_rank(self) -> int:
        """Pipeline stage of this rank."""
        return self.rank // self.layout.tensor // self.dp_size

    @property
    def loss_ranks(self) -> range:
        """The ranks that know the losses of a step, one per part of the rows. They have the last stage."""
        return range(self.world_size - self.dp_size * self.layout.tensor, self.world_size, self.layout.tensor)

    @property
    def rows(self) -> slice:
        """This rank's rows of a batch: every `dp_size`th row, so that lengths are similar."""
        return slice(self.dp_rank, None, self.dp_size)

    def accumulating(self, factor: int) -> "Mesh":
        """Return the mesh with this factor on the number of parts of a batch."""
        return replace(self, method=replace(self.method, accumulation=factor))

    def device(self, chosen: torch.device) -> torch.device:
        """Return this rank's device of the chosen kind."""
        is_gpu_of_many = chosen.type == "cuda" and self.world_size > 1
        return torch.device("cuda", self.local_rank) if is_gpu_of_many else chosen


ONE_PROCESS = Mesh()
