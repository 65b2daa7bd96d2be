"""The processes that fit one model together: what each learns from, and what they tell each other. One process by default.

    Group    one process: nothing is sent, and every method is what a single process does
    Ranks    several, each with a copy of the model (`DistributedDataParallel`) and its share of the rows of each batch

All ranks lay out the same batches and draw the same random numbers, whatever their number, and each learns from its rows. So a step over two
ranks is one process's, within the rounding of sums, and a fit may go on with another number of ranks. Whatever decides (the verdict on a loss, a
checkpoint that is due) is exchanged first, so that all ranks decide alike and none waits for one that has left.

Methods that send must be called by all ranks in the same order. Knows no epochs, data, files, or how ranks are started.

Shape suffixes: B rows of a batch, R those of this rank, N numbers of a row.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
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
from pipelines.training.fit.recompute import Recompute
from services.errors import ConfigError

if TYPE_CHECKING:
    from pipelines.training.fit.shard_files import ShardWriter

Loss = tuple[Tensor, int]
"""The mean loss of a batch's labels, and their number."""
LossFunction = Callable[[nn.Module, Batch], Loss]

_LONGEST_WAIT = timedelta(hours=6)
"""For what rank 0 does alone, such as a validation."""
BUCKET_MB = 25.0
"""torch's own size of the buckets in which DDP sends gradients, in MiB."""
_UNCOMPRESSED_STEPS = 100
"""Before PowerSGD begins: early gradients are of a higher rank."""
_AGREED = ("the step", "the batch", "the random numbers")


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a step: the sum of its losses, and the number of its labels."""

    total: float
    num_labels: int
    rank: int = 0


class Compression(StrEnum):
    """The numbers that gradients are averaged in by DDP: fp32, two bytes each, or factors of rank 1 with the error kept for the next step (Vogels et al. 2019)."""

    NONE = "none"
    BF16 = "bf16"
    FP16 = "fp16"
    POWER_SGD = "powersgd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How a step is computed, wherever that is.

    `is_bf16`: whether products are in bf16 under fp32 weights; None: on a GPU. `recompute`: what is computed again in the backward pass (`recompute.py`).
    `bucket_mb` and `compression` are those of gradients that DDP averages.
    """

    is_bf16: bool | None = None
    recompute: str = Recompute.NONE
    bucket_mb: float = BUCKET_MB
    compression: str = Compression.NONE


PLAIN = Method()


class LossOf(nn.Module):
    """The loss of a model as a module of its own: all parameters are then used below one `forward`, whose beginning and end a wrapper sees."""

    def __init__(self, model: nn.Module, loss: LossFunction) -> None:
        super().__init__()
        self.model, self._loss = model, loss

    def forward(self, batch: Batch) -> Loss:
        """Return the mean loss of the batch's labels, and their number."""
        return self._loss(self.model, batch)


class Group:
    """One process. `accumulation` is the factor on the number of parts into which each batch is split, whose gradients are added up."""

    rank, size = 0, 1
    is_divided = False
    """Whether each process has a part of the model alone."""

    def __init__(self, method: Method = PLAIN, *, accumulation: int = 1) -> None:
        self.method, self.accumulation = method, accumulation

    @property
    def layout(self) -> Layout:
        """How the processes are laid out."""
        return Layout(data=self.size)

    @property
    def is_main(self) -> bool:
        """Whether this process validates, writes files and reports progress."""
        return self.rank == 0

    def device(self, chosen: torch.device) -> torch.device:
        """Return this process's own device of the chosen kind."""
        return chosen

    def uses_bf16(self, device: torch.device) -> bool:
        """Whether products on this device are computed in bf16 under fp32 weights."""
        return device.type == "cuda" if self.method.is_bf16 is None else self.method.is_bf16

    def copy(self, model: nn.Module) -> nn.Module:
        """Return the model that is trained: this one, or a copy of which each process will have a part."""
        return model

    def wrap(self, model: nn.Module, loss: LossFunction) -> nn.Module:
        """Return the module that computes the loss of this process's rows, and whose backward pass leaves the mean gradient of all processes."""
        return LossOf(model, loss)

    def signed(self, make: MakeBatch) -> MakeBatch:
        """Return what makes the same batch, with what is needed to compare it with the other processes'."""
        return make

    def differing(self, _step: tuple[int, int], _batch: Batch, _rng: np.random.Generator) -> str:
        """Return which ranks are about to learn from something else than the others, and how that differs; empty if none is."""
        return ""

    def own(self, batch: Batch) -> Batch:
        """Return this process's rows of a batch. Those of `dropped` are of the same batch from now on."""
        return batch

    def unit(self, _batch: Batch) -> int | None:
        """Return the number of labels that gradients of all processes are counted in; None: of the first part of the batch."""
        return None

    def sending(self, _wrapped: nn.Module, *, is_last: bool) -> AbstractContextManager[None]:
        """Return the context of one part's forward and backward pass: gradients are sent after the last part alone."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of what the wrapped module returned, times a number."""
        loss.backward()  # type: ignore[no-untyped-call]

    def numbers(self, trained: nn.Module, _model: nn.Module) -> list[int]:
        """Return the place of each parameter that is trained here among those of the model that was given."""
        return list(range(len(list(trained.parameters()))))

    def drops(self, modules: Sequence[nn.Module], probability: float) -> None:
        """Note after which modules of the model that will be given there is dropout."""

    def dropped(self, values: Tensor, probability: float, _place: int) -> Tensor:
        """Return the values of this process's rows after dropout, which is the one in this place of the model."""
        return functional.dropout(values, probability)

    def shares(self, own: Share) -> list[Share]:
        """Return each rank's part of the step, by rank."""
        return [own]

    def clip(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Scale the gradients down to a norm of at most this, and return it as it was."""
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    def whole(self, _trained: nn.Module, _model: nn.Module) -> AbstractContextManager[None]:
        """Return the context in which the model that was given has the weights of what is trained, and can be used by rank 0."""
        return nullcontext()

    def take_over(self, trained: nn.Module, model: nn.Module) -> None:
        """Let the model that was given end with the weights of what was trained."""

    def export(self, trained: nn.Module, config: DecoderConfig, folder: Path) -> None:
        """Write a decoder that is trained in parts in Hugging Face's layout: each process a file, without the whole anywhere."""
        raise NotImplementedError("one process has the whole")

    def placed(self, value: Tensor, like: Tensor) -> Tensor:
        """Return a whole tensor as another one is laid out over the processes."""
        return value.to(like.device)

    def shard_writer(self, _checkpoints: Checkpoints) -> "ShardWriter | None":
        """Return what writes a state that no process has whole; None where rank 0 has it."""
        return None

    def is_true_of_main(self, own: bool) -> bool:
        """Return rank 0's answer where all have to know it, else the process's own."""
        return own

    def from_main(self, compute: Callable[[], float]) -> float:
        """Return what rank 0 computes, however long that takes."""
        return compute()

    def wait(self) -> None:
        """Return when every rank has come here."""


ALONE = Group()


class Ranks(Group):
    """Several processes, of which this is one; it learns from the `share`th of `num_shares` parts of each batch. torch's default process group has begun; one that is waited for longer than `timeout_s` within a step is given up."""

    def __init__(self, timeout_s: float, method: Method = PLAIN, *, accumulation: int = 1, local_rank: int = 0) -> None:
        super().__init__(method, accumulation=accumulation)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.share, self.num_shares = self.rank, self.size
        self._local_rank = local_rank
        self._control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._patient = dist.new_group(backend="gloo", timeout=_LONGEST_WAIT)
        self._num_rows = 0

    def device(self, chosen: torch.device) -> torch.device:
        """Return this rank's own device of the chosen kind."""
        return torch.device("cuda", self._local_rank) if chosen.type == "cuda" else chosen

    def wrap(self, model: nn.Module, loss: LossFunction) -> nn.Module:
        """Return the module whose gradients are averaged over all ranks, in buckets, while the backward pass still runs."""
        return averaged_by_ddp(LossOf(model, loss), self.method)

    def signed(self, make: MakeBatch) -> MakeBatch:
        """Return what makes the same batch with its digest."""
        return lambda: make().signed()

    def differing(self, step: tuple[int, int], batch: Batch, rng: np.random.Generator) -> str:
        """Compare step, batch and random numbers of all ranks: a rank that has left out a batch, or has another seed or file, would else learn on unnoticed."""
        drawn = json.dumps(rng.bit_generator.state).encode() + torch.get_rng_state().numpy().tobytes()
        own = [step[0] << 32 | step[1], batch.digest, number_of(drawn)]
        seen = [tuple(row) for row in self._gathered(torch.tensor(own)).tolist()]
        (usual, _), *_ = Counter(seen).most_common()  # of equally many the one that comes first, so rank 0's
        return "; ".join(
            f"rank {rank} has other values of {' and '.join(what for what, *two in zip(_AGREED, row, usual, strict=True) if two[0] != two[1])}"
            for rank, row in enumerate(seen)
            if row != usual
        )

    def own(self, batch: Batch) -> Batch:
        """Return every `num_shares`th row: about equally long ones. A rank for which none is left gets the first row, without labels."""
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
        """Draw dropout for all rows of the batch, as a single process does, and apply that of this rank's."""
        if not probability:  # for which one process draws nothing
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
        """Return what rank 0 computes, however long that takes."""
        sent = torch.tensor([compute() if self.is_main else 0.0], dtype=torch.float64)
        dist.broadcast(sent, 0, group=self._patient)
        return float(sent)

    def wait(self) -> None:
        """Return when every rank has come here."""
        dist.barrier(group=self._patient)

    def _save_parts(
        self, config: DecoderConfig, tensors: Mapping[str, Tensor], folder: Path, part: int, num_parts: int
    ) -> None:
        """Write this rank's file of a decoder, the `part`th from 0, none if it has no tensors, and their index when all have done so."""
        if tensors:
            save_part(config, tensors, folder, part + 1, num_parts)
        self.wait()
        if self.is_main:
            save_index(config, folder, num_parts)

    def _gathered(self, own_N: Tensor) -> Tensor:
        """Return every rank's numbers, a row each."""
        rows = [torch.empty_like(own_N) for _ in range(self.size)]
        with named("communication"):
            dist.all_gather(rows, own_N, group=self._control)
        return torch.stack(rows)


def averaged_by_ddp(module: nn.Module, method: Method, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Return the module whose gradients are averaged over the ranks of a group (all if not given), in buckets, while the backward pass still runs. Raises ConfigError for numbers that the device's library does not add up."""
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
    """Return which ranks' loss is not plausible, for a message; empty for a single process."""
    means = [(share.total / max(1, share.num_labels), share.rank) for share in shares]
    bad = [f"{mean:g} on rank {rank}" for mean, rank in means if not mean <= max_loss]
    return f" ({', '.join(bad)})" if len(shares) > 1 and bad else ""


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor that is laid out over several, as a view; else the tensor itself."""
    to_local: Callable[[], Tensor] | None = getattr(
        tensor, "to_local", None
    )  # torch's DTensor has it, which one process need not import
    return tensor if to_local is None else to_local()
