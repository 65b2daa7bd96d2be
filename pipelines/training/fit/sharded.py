"""Ranks of which none has the whole model: FSDP2 (`fully_shard`), tensor parallelism by the rows of `layer.py`, or one in the other.

There may be copies of what is sharded (HSDP), or of what is divided by tensor parallelism alone (DDP, whose average FSDP2 computes too).

The model that is given stays whole, on the host where there are GPUs: it is what rank 0 validates and what is written in the end. A copy of it is
trained. With bf16, the weights of layers are gathered and multiplied in bf16, and their gradients summed in fp32; masters and optimizer are fp32.

Shape suffixes: none; a sharded tensor is torch's DTensor, whose shape is the whole one's.
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
    """Ranks of a mesh (data, shard, tensor). Those that differ along `tensor` alone learn from the same rows."""

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
        self._mesh: DeviceMesh  # of the device of the model
        self.share, self.num_shares = self.rank // layout.tensor, layout.data * layout.shard

    @property
    def layout(self) -> Layout:
        """How the processes are laid out."""
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
        """Shard the model, in place, and return the module that computes the loss of this rank's rows."""
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
            fully_shard(whole, mesh=mesh)  # what losses read beside the layers stays fp32
        return whole

    @contextmanager
    def sending(self, wrapped: nn.Module, *, is_last: bool) -> Iterator[None]:
        """Return the context of one part's forward and backward pass."""
        if isinstance(wrapped, FSDPModule):
            wrapped.set_requires_gradient_sync(is_last)
        yield

    def dropped(self, values: Tensor, probability: float, place: int) -> Tensor:
        """Apply dropout to a product that was divided as to a whole one: the same on all ranks that share rows."""
        if not isinstance(values, DTensor):
            return super().dropped(values, probability, place)
        whole = values.redistribute(placements=[Replicate()]).to_local()
        return DTensor.from_local(super().dropped(whole, probability, place), values.device_mesh, [Replicate()])

    def shares(self, own: Share) -> list[Share]:
        """Return each share's part of the step: ranks of one tensor group have the same."""
        return super().shares(own)[:: self._layout.tensor]

    def clip(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Scale the gradients of all ranks down to a norm of at most this, and return it as it was."""
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
        """Gather the weights into the whole model, which is on rank 0's device inside this block, and on the host outside."""
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
        """Return what writes a state of which each rank has a part."""
        return ShardWriter(checkpoints, is_main=self.is_main)

    def export(self, trained: nn.Module, config: DecoderConfig, folder: Path) -> None:
        """Write a file a rank, about equally large. Tensors are put together one at a time."""
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
        """Return a whole tensor as its rows are over the ranks of another: the same shape, or one that is alike along the first dimension or not at all."""
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
    """Return the sum of squares of tensors of one layout, whose parts on this rank these are: one exchange for all of them."""
    own = torch.stack(torch._foreach_norm(parts)).square().sum()
    if laid_out is None:
        return own
    mesh, placements = laid_out
    partly = [Replicate() if placement.is_replicate() else Partial() for placement in placements]
    return _whole(DTensor.from_local(own, mesh, partly))


def _split_products(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide each layer's products by the table: those that come from the residual stream by their outputs, those that go back to it by their inputs. Raises ConfigError."""
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
