"""Data parallelism: each rank has a copy of the model, and DDP averages their gradients in the backward pass."""

from contextlib import nullcontext

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from pipelines.training.batches import Batch, Loss, LossFunction
from pipelines.training.options import Compression
from pipelines.training.parallel.dropout import Dropout
from pipelines.training.parallel.mesh import Mesh, Method
from pipelines.training.parallel.model import ParallelModel
from services.errors import ConfigError

_UNCOMPRESSED_STEPS = 100
"""Steps before PowerSGD begins: early gradients have a higher rank."""


class DdpModel(ParallelModel):
    """A copy of the model in each rank, which learns from a part of each batch's rows."""

    def __init__(self, model: nn.Module, mesh: Mesh, loss: LossFunction, dropout: Dropout) -> None:
        super().__init__(model, mesh, loss, dropout)
        self._averaged = averaged_by_ddp(self.loss_of, mesh.method)

    def loss(self, part: Batch, _unit: int | None, *, is_last: bool) -> Loss:
        """Return the mean loss of this rank's rows, and their number of labels."""
        with nullcontext() if is_last else self._averaged.no_sync():
            loss: Loss = self._averaged(self.own(part))
        return loss


def averaged_by_ddp(
    module: nn.Module, method: Method, group: dist.ProcessGroup | None = None
) -> DistributedDataParallel:
    """Return a module that averages gradients over a group's ranks (None: all), in buckets, during the backward pass.

    Raises ConfigError for a compression that the device's library cannot sum.
    """
    if method.compression == Compression.BF16 and next(module.parameters()).device.type != "cuda":
        raise ConfigError("--compression: DDP sends bf16 only on GPUs; give fp16 or powersgd on a CPU")
    wrapped = DistributedDataParallel(
        module,
        process_group=group,
        forward_sync_buffers=False,
        gradient_as_bucket_view=True,
        bucket_cap_mb=method.bucket_mb,
    )
    if method.compression == Compression.POWER_SGD:
        state = PowerSGDState(group, start_powerSGD_iter=_UNCOMPRESSED_STEPS)
        wrapped.register_comm_hook(state, powerSGD_hook)
    elif method.compression != Compression.NONE:
        halved = fp16_compress_hook if method.compression == Compression.FP16 else bf16_compress_hook
        wrapped.register_comm_hook(group, halved)
    return wrapped
