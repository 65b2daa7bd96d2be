"""A model laid out for training, with its loss: whole in one process, or over the ranks of a mesh.

    ParallelModel    one process
    DdpModel         a copy in each process, which learns from a part of each batch's rows (`ddp.py`)
    DividedModel     a part of the model in each process: FSDP2 and tensor parallelism (`fsdp_tp.py`), or pipeline
                     stages (`pipeline.py`)

All ranks build the same batches and draw the same random numbers, independent of world size; each learns from its rows.
A step over two ranks therefore equals a single process's step within the rounding of sums, and a fit may resume with
another number of ranks. Knows no epochs, data or checkpoints, and not how ranks are started.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from models.decoder.config import DecoderConfig
from models.decoder.weights import save_index, save_part
from pipelines.training.batches import Batch, Loss, LossFunction, rows_of
from pipelines.training.parallel.dropout import Dropout, drop_rows
from pipelines.training.parallel.mesh import Mesh
from pipelines.training.parallel.ranks import RankGroup


class LossOf(nn.Module):
    """A model's loss as a module: all parameters are used below one `forward`, which a wrapper can observe."""

    def __init__(self, model: nn.Module, loss: LossFunction) -> None:
        super().__init__()
        self.model, self._loss = model, loss

    def forward(self, batch: Batch) -> Loss:
        """Return the mean loss of the batch's labels, and their number."""
        return self._loss(self.model, batch)


class ParallelModel:
    """A model in one process. `trained` is the module whose parameters this process trains."""

    def __init__(self, model: nn.Module, mesh: Mesh, loss: LossFunction, dropout: Dropout) -> None:
        self.model, self.mesh, self.ranks, self.dropout = model, mesh, RankGroup(mesh), dropout
        self.trained = model
        self.num_rows = 0
        """Rows of the current part of a batch, over all ranks."""
        self.loss_of: nn.Module = LossOf(model, loss)
        if mesh.world_size > 1:
            dropout.apply = self.drop

    @property
    def numbers(self) -> list[int]:
        """The index of each trained parameter among the whole model's parameters."""
        number_of = {name: number for number, (name, _) in enumerate(self.model.named_parameters())}
        return [number_of[name] for name, _ in self.trained.named_parameters()]

    def loss(self, part: Batch, _unit: int | None, *, is_last: bool) -> Loss:
        """Return the mean loss of this rank's rows of a part of a batch, and their number of labels.

        A backward pass from the loss gives the mean gradient of all ranks; it is exchanged only after the last part.
        `_unit` is the label count that scales the gradients of all ranks, None in a single process.
        """
        loss: Loss = self.loss_of(self.own(part))
        return loss

    def own(self, part: Batch) -> Batch:
        """Return this rank's rows of a part. A rank without rows gets the first row, without labels."""
        self.num_rows = len(part.tokens)
        if self.mesh.world_size == 1:
            return part
        if self.mesh.dp_rank < self.num_rows:
            return rows_of(part, self.mesh.rows)
        first = rows_of(part, slice(0, 1))
        return Batch(first.tokens, first.labels, torch.zeros_like(first.is_label), (0,))

    def drop(self, values: Tensor, _index: int) -> Tensor:
        """Apply dropout to this rank's rows after the module of the model at this index."""
        return drop_rows(values, self.dropout.probability, self.num_rows, self.mesh)

    def clip(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Clip the gradients of all ranks to this norm; return the norm before clipping."""
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Load the trained weights into the whole model inside this block, for use by rank 0."""
        yield

    def take_over(self) -> None:
        """Load the trained weights into the whole model at the end."""


class DividedModel(ParallelModel, ABC):
    """A model divided over the ranks.

    The given model stays whole, on the host if there are GPUs: rank 0 validates it, and it is written at the end. A
    copy is trained.
    """

    @abstractmethod
    def gather(self) -> None:
        """Load the trained weights of all ranks into the whole model, on the host."""

    @abstractmethod
    def own_file(self) -> tuple[Mapping[str, Tensor], int, int]:
        """Return the tensors that this rank writes, the index of its file, and the number of files."""

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Gather the weights into the whole model.

        Inside this block the model is on rank 0's device, otherwise on the host.
        """
        self.gather()
        if self.mesh.is_main:
            self.model.to(next(self.trained.parameters()).device)
        try:
            yield
        finally:
            self.model.to("cpu")

    def take_over(self) -> None:
        """Gather the weights into the whole model, and move it back to the device."""
        self.gather()
        self.model.to(next(self.trained.parameters()).device)

    def export(self, config: DecoderConfig, folder: Path) -> None:
        """Write a decoder in Hugging Face's layout, a file per rank with tensors, without gathering the whole."""
        tensors, part, num_parts = self.own_file()
        if tensors:
            save_part(config, tensors, folder, part + 1, num_parts)
        self.ranks.wait()
        if self.mesh.is_main:
            save_index(config, folder, num_parts)
