"""The processes that fit one model together: which rows each learns from, and how they communicate.

One process by default.

    Group    one process: sends nothing; each method has its single-process behavior
    Ranks    several processes: each has a model copy (`DistributedDataParallel`) and a part of each batch's rows

All ranks build the same batches and draw the same random numbers, independent of world size; each learns from its rows.
A step over two ranks therefore equals a single process's step within the rounding of sums, and a fit may resume with
another number of ranks. Inputs of decisions (whether a loss is usable, whether a checkpoint is due) are exchanged
first, so that all ranks decide alike and no rank waits for another that has left.

All ranks must call the methods that send in the same order. Knows no epochs, data, files, or how ranks are started.

Shape suffixes: B rows of a batch, R rows of this rank, N numbers of a row.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from models.decoder.config import DecoderConfig
from models.decoder.weights import save_index, save_part
from pipelines.planner.mesh import Layout
from pipelines.training.fit.batches import Batch, MakeBatch, number_of, rows_of
from pipelines.training.fit.checkpoints import Checkpoints
from pipelines.training.fit.ranges import named
from pipelines.training.options import BUCKET_MB, Compression, Recompute
from services.errors import ConfigError

if TYPE_CHECKING:
    from pipelines.training.fit.shard_files import ShardWriter

Loss = tuple[Tensor, int]
"""Mean loss of a batch's labels, and their number."""
LossFunction = Callable[[nn.Module, Batch], Loss]

_LONGEST_WAIT = timedelta(hours=6)
"""Timeout for work that only rank 0 does, such as a validation."""
_UNCOMPRESSED_STEPS = 100
"""Steps before PowerSGD begins: early gradients have a higher rank."""
_AGREED = ("the step", "the batch", "the random numbers")


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a step: the sum of its losses, and the number of its labels."""

    total: float
    num_labels: int
    rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How a step is computed, on one process or many.

    `is_bf16`: whether matrix products run in bf16 with fp32 weights; None: on a GPU. `recompute`: activations
    recomputed in the backward pass (`recompute.py`). `bucket_mb` and `compression` apply to gradients that DDP
    averages.
    """

    is_bf16: bool | None = None
    recompute: str = Recompute.NONE
    bucket_mb: float = BUCKET_MB
    compression: str = Compression.NONE


PLAIN = Method()


class LossOf(nn.Module):
    """A model's loss as a module: all parameters are used below one `forward`, which a wrapper can observe."""

    def __init__(self, model: nn.Module, loss: LossFunction) -> None:
        super().__init__()
        self.model, self._loss = model, loss

    def forward(self, batch: Batch) -> Loss:
        """Return the mean loss of the batch's labels, and their number."""
        return self._loss(self.model, batch)


class Group:
    """A single process. `accumulation` multiplies the number of parts into which each batch is split."""

    rank, size = 0, 1
    is_divided = False
    """Whether each process holds only a part of the model."""

    def __init__(self, method: Method = PLAIN, *, accumulation: int = 1) -> None:
        self.method, self.accumulation = method, accumulation

    @property
    def layout(self) -> Layout:
        """Layout of the processes."""
        return Layout(data=self.size)

    @property
    def is_main(self) -> bool:
        """Whether this process validates, writes files and reports progress."""
        return self.rank == 0

    def device(self, chosen: torch.device) -> torch.device:
        """Return this process's device of the chosen kind."""
        return chosen

    def uses_bf16(self, device: torch.device) -> bool:
        """Whether matrix products on this device run in bf16 with fp32 weights."""
        return device.type == "cuda" if self.method.is_bf16 is None else self.method.is_bf16

    def copy(self, model: nn.Module) -> nn.Module:
        """Return the model to train: the given model, or a copy to be sharded over the processes."""
        return model

    def wrap(self, model: nn.Module, loss: LossFunction) -> nn.Module:
        """Return a module that computes the loss of this process's rows.

        Its backward pass yields the mean gradient of all processes.
        """
        return LossOf(model, loss)

    def signed(self, make: MakeBatch) -> MakeBatch:
        """Return a builder of the same batch with the data needed to compare it across processes."""
        return make

    def differing(self, _step: tuple[int, int], _batch: Batch, _rng: np.random.Generator) -> str:
        """Return which ranks are about to use different inputs, and the difference; empty if none."""
        return ""

    def own(self, batch: Batch) -> Batch:
        """Return this process's rows of a batch. Later rows of `dropped` belong to the same batch."""
        return batch

    def unit(self, _batch: Batch) -> int | None:
        """Return the label count that scales the gradients of all processes; None: that of the batch's first part."""
        return None

    def sending(self, _wrapped: nn.Module, *, is_last: bool) -> AbstractContextManager[None]:
        """Return the context of one part's forward and backward pass; gradients are sent only after the last part."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Backpropagate from the wrapped module's output, already multiplied by a factor."""
        loss.backward()  # type: ignore[no-untyped-call]

    def numbers(self, trained: nn.Module, _model: nn.Module) -> list[int]:
        """Return the index of each parameter trained here among the given model's parameters."""
        return list(range(len(list(trained.parameters()))))

    def drops(self, modules: Sequence[nn.Module], probability: float) -> None:
        """Record the modules of the given model that have dropout."""

    def dropped(self, values: Tensor, probability: float, _place: int) -> Tensor:
        """Return the values of this process's rows after the model's dropout at this index."""
        return functional.dropout(values, probability)

    def shares(self, own: Share) -> list[Share]:
        """Return each rank's part of the step, by rank."""
        return [own]

    def clip(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Clip the gradients to this norm; return the norm before clipping."""
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    def whole(self, _trained: nn.Module, _model: nn.Module) -> AbstractContextManager[None]:
        """Return a context that loads the trained weights into the given model, for use by rank 0."""
        return nullcontext()

    def take_over(self, trained: nn.Module, model: nn.Module) -> None:
        """Copy the trained weights into the given model at the end."""

    def export(self, trained: nn.Module, config: DecoderConfig, folder: Path) -> None:
        """Write a sharded decoder in Hugging Face's layout, one file per process, without gathering the whole."""
        raise NotImplementedError("one process has the whole")

    def placed(self, value: Tensor, like: Tensor) -> Tensor:
        """Return a whole tensor in another tensor's layout over the processes."""
        return value.to(like.device)

    def shard_writer(self, _checkpoints: Checkpoints) -> "ShardWriter | None":
        """Return a writer of a state that no process holds whole; None if rank 0 holds it."""
        return None

    def is_true_of_main(self, own: bool) -> bool:
        """Return rank 0's value if all processes must know it, otherwise the process's own."""
        return own

    def from_main(self, compute: Callable[[], float]) -> float:
        """Return rank 0's result of `compute`, however long it takes."""
        return compute()

    def wait(self) -> None:
        """Wait until every rank has arrived."""


ALONE = Group()


class Ranks(Group):
    """One of several processes; it learns from part `share` of `num_shares` of each batch.

    torch's default process group must be initialised. A process that does not answer within `timeout_s` of a step is
    given up.
    """

    def __init__(self, timeout_s: float, method: Method = PLAIN, *, accumulation: int = 1, local_rank: int = 0) -> None:
        super().__init__(method, accumulation=accumulation)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.share, self.num_shares = self.rank, self.size
        self._local_rank = local_rank
        self._control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._patient = dist.new_group(backend="gloo", timeout=_LONGEST_WAIT)
        self._num_rows = 0

    def device(self, chosen: torch.device) -> torch.device:
        """Return this rank's device of the chosen kind."""
        return torch.device("cuda", self._local_rank) if chosen.type == "cuda" else chosen

    def wrap(self, model: nn.Module, loss: LossFunction) -> nn.Module:
        """Return a module that averages gradients over all ranks, in buckets, during the backward pass."""
        return averaged_by_ddp(LossOf(model, loss), self.method)

    def signed(self, make: MakeBatch) -> MakeBatch:
        """Return a builder of the same batch with its digest."""
        return lambda: make().signed()

    def differing(self, step: tuple[int, int], batch: Batch, rng: np.random.Generator) -> str:
        """Compare step, batch and random numbers of all ranks.

        Otherwise a rank with another seed, file or skipped batch would go unnoticed.
        """
        drawn = json.dumps(rng.bit_generator.state).encode() + torch.get_rng_state().numpy().tobytes()
        own = [step[0] << 32 | step[1], batch.digest, number_of(drawn)]
        seen = [tuple(row) for row in self._gathered(torch.tensor(own)).tolist()]
        (usual, _), *_ = Counter(seen).most_common()  # among equally frequent rows the first, so rank 0's
        return "; ".join(
            f"rank {rank} has other values of {' and '.join(what for what, *two in zip(_AGREED, row, usual, strict=True) if two[0] != two[1])}"
            for rank, row in enumerate(seen)
            if row != usual
        )

    def own(self, batch: Batch) -> Batch:
        """Return every `num_shares`th row, so that lengths are similar.

        A rank without rows gets the first row, without labels.
        """
        self._num_rows = len(batch.tokens)
        if self.share < self._num_rows:
            return rows_of(batch, slice(self.share, None, self.num_shares))
        first = rows_of(batch, slice(0, 1))
        return Batch(first.tokens, first.labels, torch.zeros_like(first.is_label), (0,))

    def unit(self, batch: Batch) -> int:
        """Return the batch's number of positions, which all ranks know."""
        return sum(batch.lengths)

    def sending(self, wrapped: nn.Module, *, is_last: bool) -> AbstractContextManager[None]:
        """Return the context of one part's forward and backward pass."""
        assert isinstance(wrapped, DistributedDataParallel)
        return nullcontext() if is_last else wrapped.no_sync()

    def dropped(self, values: Tensor, probability: float, _place: int) -> Tensor:
        """Draw dropout for all rows of the batch, as a single process does, and apply this rank's rows of it."""
        if not probability:  # a single process draws nothing for these
            return values
        own_RN = values.reshape(len(range(self.share, self._num_rows, self.num_shares)) or 1, -1)
        kept_BN = torch.empty((self._num_rows, own_RN.shape[1]), dtype=values.dtype, device=values.device)
        kept_BN.bernoulli_(1 - probability).div_(1 - probability)
        kept_RN = kept_BN[self.share :: self.num_shares] if self.share < self._num_rows else kept_BN[:1]
        return (own_RN * kept_RN).view_as(values)

    def shares(self, own: Share) -> list[Share]:
        """Return each rank's part of the step, by rank."""
        sent = torch.tensor([own.total, own.num_labels], dtype=torch.float64)
        gathered = enumerate(self._gathered(sent).tolist())
        return [Share(total, int(number), rank) for rank, (total, number) in gathered]

    def from_main(self, compute: Callable[[], float]) -> float:
        """Return rank 0's result, however long it takes."""
        sent = torch.tensor([compute() if self.is_main else 0.0], dtype=torch.float64)
        dist.broadcast(sent, 0, group=self._patient)
        return float(sent)

    def wait(self) -> None:
        """Wait until every rank has arrived."""
        dist.barrier(group=self._patient)

    def _save_parts(
        self, config: DecoderConfig, tensors: Mapping[str, Tensor], folder: Path, part: int, num_parts: int
    ) -> None:
        """Write this rank's file of a decoder (number `part`, from 0; none without tensors).

        Write the index when all are done.
        """
        if tensors:
            save_part(config, tensors, folder, part + 1, num_parts)
        self.wait()
        if self.is_main:
            save_index(config, folder, num_parts)

    def _gathered(self, own_N: Tensor) -> Tensor:
        """Return every rank's numbers, one row per rank."""
        rows = [torch.empty_like(own_N) for _ in range(self.size)]
        with named("communication"):
            dist.all_gather(rows, own_N, group=self._control)
        return torch.stack(rows)


def averaged_by_ddp(module: nn.Module, method: Method, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Return a module that averages gradients over a group's ranks (None: all), in buckets, during the backward pass.

    Raises ConfigError for a compression that the device's library cannot sum.
    """
    if method.compression == Compression.BF16 and next(module.parameters()).device.type != "cuda":
        raise ConfigError("--compression: DDP sends bf16 on GPUs alone; give fp16 or powersgd on a CPU")
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


def unusable_share(shares: Sequence[Share], max_loss: float) -> str:
    """Return which ranks' losses are implausible, for a message; empty for a single process."""
    means = [(share.total / max(1, share.num_labels), share.rank) for share in shares]
    bad = [f"{mean:g} on rank {rank}" for mean, rank in means if not mean <= max_loss]
    return f" ({', '.join(bad)})" if len(shares) > 1 and bad else ""


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor sharded over several, as a view; otherwise the tensor itself."""
    to_local: Callable[[], Tensor] | None = getattr(
        tensor, "to_local", None
    )  # torch's DTensor has it; a single process need not import DTensor
    return tensor if to_local is None else to_local()
