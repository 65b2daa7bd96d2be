"""Sharded models: FSDP2 (`fully_shard`), tensor parallelism by the rows of `layer.py`, or the two combined.

Shards may be replicated (HSDP), as may tensor-parallel parts (DDP, whose averages FSDP2 computes too).

With bf16, layers gather and multiply weights in bf16 and sum gradients in fp32; master weights and optimizer
are fp32.

Shape suffixes: none; a sharded tensor is torch's DTensor, whose shape is the global shape.
"""

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from models.decoder.decoder import Decoder
from models.decoder.layer import Projection, rows_of
from pipelines.training.batches import Batch, Loss, LossFunction
from pipelines.training.parallel.dropout import Dropout
from pipelines.training.parallel.mesh import Mesh
from pipelines.training.parallel.model import DividedModel, LossOf
from pipelines.training.parallel.recompute import blocks_of
from pipelines.training.parallel.tensors import local
from services.errors import ConfigError

_BACK_TO_STREAM = {"output", "down"}
"""The joined matrices of `layer.py` whose products are added to the residual stream."""


class FsdpTpModel(DividedModel):
    """A model over a mesh (data, shard, tensor). Ranks that differ only along `tensor` learn from the same rows."""

    def __init__(self, model: nn.Module, mesh: Mesh, loss: LossFunction, dropout: Dropout) -> None:
        super().__init__(model, mesh, loss, dropout)
        layout, kind = mesh.layout, next(model.parameters()).device.type
        sizes = (layout.data, layout.shard, layout.tensor)
        device_mesh = init_device_mesh(kind, sizes, mesh_dim_names=("data", "shard", "tensor"))
        self.trained = copy.deepcopy(model)
        model.to("cpu")
        self.loss_of = LossOf(self.trained, loss)
        if layout.tensor > 1:
            _split_products(self.trained, device_mesh["tensor"])
        if mesh.dp_size > 1:
            self._shard(device_mesh["data", "shard"] if layout.data > 1 else device_mesh["shard"])

    def _shard(self, device_mesh: DeviceMesh) -> None:
        """Shard each block of the model, then the remaining parameters, in place."""
        uses_bf16 = self.mesh.method.uses_bf16(torch.device(device_mesh.device_type))
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if uses_bf16 else None, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        for block in blocks_of(self.trained):
            fully_shard(block, mesh=device_mesh, mp_policy=policy)
        fully_shard(self.loss_of, mesh=device_mesh)  # parameters that losses read outside of layers stay fp32

    def loss(self, part: Batch, _unit: int | None, *, is_last: bool) -> Loss:
        """Return the mean loss of this rank's rows, and their number of labels."""
        if isinstance(self.loss_of, FSDPModule):
            self.loss_of.set_requires_gradient_sync(is_last)
        return super().loss(part, _unit, is_last=is_last)

    def drop(self, values: Tensor, _index: int) -> Tensor:
        """Apply dropout to a tensor-parallel product as to a whole one: the same mask on all ranks that share rows."""
        if not isinstance(values, DTensor):
            return super().drop(values, _index)
        whole = values.redistribute(placements=[Replicate()]).to_local()
        return DTensor.from_local(super().drop(whole, _index), values.device_mesh, [Replicate()])

    def clip(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Clip the gradients of all ranks to this norm; return the norm before clipping."""
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        by_layout: dict[Any, list[Tensor]] = defaultdict(list)
        for grad in grads:
            by_layout[(grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None].append(local(grad))
        squares = [_sum_of_squares(layout, parts) for layout, parts in by_layout.items()]
        norm = torch.stack(squares).sum().sqrt()
        torch._foreach_mul_([local(grad) for grad in grads], (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    @torch.no_grad()
    def gather(self) -> None:
        """Load the trained weights of all ranks into the whole model."""
        whole = dict(self.model.named_parameters())
        for name, parameter in self.trained.named_parameters():
            whole[name].copy_(_whole(parameter))

    def own_file(self) -> tuple[Mapping[str, Tensor], int, int]:
        """Return this rank's tensors. Files have similar sizes; tensors are gathered one at a time."""
        held, own = [0] * self.mesh.world_size, dict[str, Tensor]()
        for name, tensor in self.trained.state_dict().items():
            writer = held.index(min(held))
            held[writer] += tensor.numel()
            whole = _whole(tensor)
            if writer == self.mesh.rank:
                own[name] = whole.cpu()
        return own, self.mesh.rank, sum(number > 0 for number in held)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _sum_of_squares(layout: Any, parts: list[Tensor]) -> Tensor:
    """Return the sum of squares of tensors with one layout from this rank's parts, in one exchange."""
    own = torch.stack(torch._foreach_norm(parts)).square().sum()
    if layout is None:
        return own
    mesh, placements = layout
    partly = [Replicate() if placement.is_replicate() else Partial() for placement in placements]
    return _whole(DTensor.from_local(own, mesh, partly))


def _split_products(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard layers' products by the table: by outputs if they read the residual stream, by inputs if they write to it.

    Raises ConfigError.
    """
    if not isinstance(model, Decoder):
        raise ConfigError("--parallel: tensor parallelism is for decoders; give ddp or fsdp")
    config, size = model.config, mesh.size()
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(config, key) % size:
            raise ConfigError(f"--parallel: tp{size} does not divide the decoder's {key}, {getattr(config, key)}")
    styles: dict[str, ParallelStyle] = {}
    for row in rows_of(config):
        if isinstance(row, Projection):
            styles[row.name] = RowwiseParallel() if row.matrix in _BACK_TO_STREAM else ColwiseParallel()
    for layer in model.layers:
        parallelize_module(layer, mesh, styles)
