"""Sharded models: FSDP2 (`fully_shard`), tensor parallelism by the rows of `layer.py`, or the two combined.

Shards may be replicated (HSDP), as may tensor-parallel parts (DDP, whose averages FSDP2 computes too).

The given model stays whole, on the host if there are GPUs: rank 0 validates it, and it is written at the end. A copy is
trained. With bf16, layers gather and multiply weights in bf16 and sum gradients in fp32; master weights and optimizer
are fp32.

Shape suffixes: none; a sharded tensor is torch's DTensor, whose shape is the global shape.
"""

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from models.decoder.config import DecoderConfig
from models.decoder.decoder import Decoder
from models.decoder.layer import Projection, rows_of
from pipelines.planner.mesh import Layout
from pipelines.training.fit.checkpoints import Checkpoints
from pipelines.training.fit.parallel import PLAIN, LossFunction, LossOf, Method, Ranks, Share, local
from pipelines.training.fit.recompute import blocks_of
from pipelines.training.fit.shard_files import ShardWriter
from services.errors import ConfigError

_BACK_TO_STREAM = {"output", "down"}
"""The joined matrices of `layer.py` whose products are added to the residual stream."""


class Shards(Ranks):
    """Ranks of a mesh (data, shard, tensor). Ranks that differ only along `tensor` learn from the same rows."""

    is_divided = True

    def __init__(
        self,
        layout: Layout,
        timeout_s: float,
        method: Method = PLAIN,
        *,
        accumulation: int = 1,
        local_rank: int = 0,
    ) -> None:
        super().__init__(timeout_s, method, accumulation=accumulation, local_rank=local_rank)
        self._layout = layout
        self._mesh: DeviceMesh  # device of the model
        self.share, self.num_shares = self.rank // layout.tensor, layout.data * layout.shard

    @property
    def layout(self) -> Layout:
        """Layout of the processes."""
        return self._layout

    def copy(self, model: nn.Module) -> nn.Module:
        """Return a copy of the model, which `wrap` shards. The model itself moves to the host."""
        self._mesh = init_device_mesh(
            next(model.parameters()).device.type,
            (self._layout.data, self._layout.shard, self._layout.tensor),
            mesh_dim_names=("data", "shard", "tensor"),
        )
        trained = copy.deepcopy(model)
        model.to("cpu")
        return trained

    def wrap(self, model: nn.Module, loss: LossFunction) -> nn.Module:
        """Shard the model in place, and return a module that computes the loss of this rank's rows."""
        whole = LossOf(model, loss)
        if self._layout.tensor > 1:
            _split_products(model, self._mesh["tensor"])
        if self.num_shares > 1:
            mesh = self._mesh["data", "shard"] if self._layout.data > 1 else self._mesh["shard"]
            kind = self._mesh.device_type
            policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16 if self.uses_bf16(torch.device(kind)) else None,
                reduce_dtype=torch.float32,
                cast_forward_inputs=False,
            )
            for block in blocks_of(model):
                fully_shard(block, mesh=mesh, mp_policy=policy)
            fully_shard(whole, mesh=mesh)  # parameters that losses read outside of layers stay fp32
        return whole

    @contextmanager
    def sending(self, wrapped: nn.Module, *, is_last: bool) -> Iterator[None]:
        """Return the context of one part's forward and backward pass."""
        if isinstance(wrapped, FSDPModule):
            wrapped.set_requires_gradient_sync(is_last)
        yield

    def dropped(self, values: Tensor, probability: float, place: int) -> Tensor:
        """Apply dropout to a tensor-parallel product as to a whole one: the same mask on all ranks that share rows."""
        if not isinstance(values, DTensor):
            return super().dropped(values, probability, place)
        whole = values.redistribute(placements=[Replicate()]).to_local()
        return DTensor.from_local(super().dropped(whole, probability, place), values.device_mesh, [Replicate()])

    def shares(self, own: Share) -> list[Share]:
        """Return each share's part of the step; ranks of one tensor group have the same."""
        return super().shares(own)[:: self._layout.tensor]

    def clip(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Clip the gradients of all ranks to this norm; return the norm before clipping."""
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        alike: dict[Any, list[Tensor]] = defaultdict(list)
        for grad in grads:
            alike[(grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None].append(local(grad))
        squares = [_summed(laid_out, parts) for laid_out, parts in alike.items()]
        norm = torch.stack(squares).sum().sqrt()
        torch._foreach_mul_([local(grad) for grad in grads], (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    @contextmanager
    def whole(self, trained: nn.Module, model: nn.Module) -> Iterator[None]:
        """Gather the weights into the whole model.

        Inside this block the model is on rank 0's device, otherwise on the host.
        """
        _gather(trained, model)
        if self.is_main:
            model.to(next(trained.parameters()).device)
        try:
            yield
        finally:
            model.to("cpu")

    def take_over(self, trained: nn.Module, model: nn.Module) -> None:
        """Gather the weights into the whole model, and move it back to the device."""
        _gather(trained, model)
        model.to(next(trained.parameters()).device)

    def shard_writer(self, checkpoints: Checkpoints) -> ShardWriter:
        """Return a writer of the sharded state."""
        return ShardWriter(checkpoints, is_main=self.is_main)

    def export(self, trained: nn.Module, config: DecoderConfig, folder: Path) -> None:
        """Write one file per rank, of similar sizes. Tensors are gathered one at a time."""
        held, own = [0] * self.size, dict[str, Tensor]()
        for name, tensor in trained.state_dict().items():
            writer = held.index(min(held))
            held[writer] += tensor.numel()
            whole = _whole(tensor)
            if writer == self.rank:
                own[name] = whole.cpu()
        self._save_parts(config, own, folder, self.rank, sum(number > 0 for number in held))

    def is_true_of_main(self, own: bool) -> bool:
        """Return rank 0's answer."""
        return bool(self.from_main(lambda: float(own)))

    def placed(self, value: Tensor, like: Tensor) -> Tensor:
        """Return a whole tensor sharded by rows like another tensor.

        The other tensor has the same shape, or the tensor is constant along the first dimension or along none.
        """
        if not isinstance(like, DTensor) or isinstance(value, DTensor):
            return value.to(like.device)
        if value.shape == like.shape:
            return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
        wide = value.to(like.device).expand(like.shape)
        return distribute_tensor(wide.contiguous(), like.device_mesh, like.placements, src_data_rank=None)


@torch.no_grad()
def _gather(trained: nn.Module, model: nn.Module) -> None:
    into = dict(model.named_parameters())
    for name, parameter in trained.named_parameters():
        into[name].copy_(_whole(parameter))


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _summed(laid_out: Any, parts: list[Tensor]) -> Tensor:
    """Return the sum of squares of tensors with one layout from this rank's parts, in one exchange."""
    own = torch.stack(torch._foreach_norm(parts)).square().sum()
    if laid_out is None:
        return own
    mesh, placements = laid_out
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
