"""The training loop of all our models: epochs of batches, periodic validation, best weights kept.

The complete state is saved during the fit (`checkpoints.py`). A killed fit resumes to the same weights, bit for bit. A
batch with an unusable loss or gradient is skipped after a return to the last checkpoint. Model, loss and metric are
arguments.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from pipelines.runner.stage import Progress
from pipelines.training.batches import Batch, Loss, LossFunction, MakeBatch, split_batch
from pipelines.training.fit.checkpoints import Checkpoints, FitState
from pipelines.training.fit.descent import Descent, DescentOptions, UnusableLoss
from pipelines.training.fit.loss_curve import LossCurve
from pipelines.training.fit.memory import PeakMemory, kept_memory
from pipelines.training.fit.prefetch import ready_batches
from pipelines.training.fit.watch import UNWATCHED, Watch
from pipelines.training.parallel.dropout import Dropout
from pipelines.training.parallel.mesh import ONE_PROCESS, Mesh
from pipelines.training.parallel.model import ParallelModel
from pipelines.training.parallel.parallelize import parallelize
from pipelines.training.parallel.recompute import recomputed
from pipelines.training.parallel.tensors import ELSEWHERE, Like, placed
from pipelines.training.ranges import named
from services.errors import StageFailed

if TYPE_CHECKING:
    from pipelines.training.fit.shard_writer import ShardWriter

_MAX_SKIPPED = 3
_SPIKE = 3.0
"""A loss above this multiple of the uniform loss is a spike: the model is far worse than random."""

TIMES = ("data", "step", "others", "checkpoint", "validation")
_BETWEEN = ("checkpoint", "validation")
"""Phases whose memory does not count as memory of steps."""
_LONG_WAIT, _LONG_FIT_S = 0.2, 1.0
"""Maximum fraction of step time spent waiting for batches, in a fit of more than `_LONG_FIT_S`."""

OnValidation = Callable[[int, float], None]
"""Called with the epoch and its score; an exception raised here ends the fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """Number of epochs, validation interval, and the optimizer's options.

    `num_parts` is the number of parts of each batch whose gradients are accumulated: less memory for the same step.
    """

    epochs: int
    validate_every: int
    descent: DescentOptions
    num_parts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Functions for the epoch's batches, the loss and the validation score.

    `batches` draws with `rng`; building a batch draws nothing.
    `uniform_loss` is the loss of a model that scores all items alike; `flops` returns the FLOPs of a step over a batch
    with this many labels. `dropout` is applied during the fit.
    """

    batches: Callable[[], Sequence[MakeBatch]]
    rng: np.random.Generator
    loss: LossFunction
    validate: Callable[[], float]
    uniform_loss: float
    flops: Callable[[Batch, int], int] | None = None
    on_validation: OnValidation | None = None
    on_fitted: Callable[[ParallelModel], None] | None = None
    """Called by all processes with the trained model, or their parts of it, once it has the best weights."""
    dropout: Dropout = field(default_factory=Dropout)


@dataclass(slots=True, kw_only=True)
class Position:
    """Progress of a fit: the next batch of the running epoch, and the records so far. JSON values only."""

    rng: dict[str, Any]
    """State of the task's generator at the start of the epoch."""
    epoch: int = 1
    batch: int = 0
    total_loss: float = 0.0
    num_steps: int = 0
    """Optimizer steps within the epoch."""
    num_tokens: int = 0
    """Positions of all steps so far, without padding."""
    flops: int = 0
    seconds: float = 0.0
    """Seconds spent in steps, excluding validation, checkpoints and the building of batches."""
    times: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIMES, 0.0))
    """Seconds of this process by activity, over all epochs."""
    losses: LossCurve = field(default_factory=LossCurve)
    best_score: float = -1.0
    curve: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "Position":
        return cls(**{**values, "losses": LossCurve(**values["losses"])})


@dataclass(frozen=True, slots=True)
class Fitted:
    """Validation curve by epoch and step, skipped batches, and totals of the steps.

    Totals are positions without padding, FLOPs if counted, and seconds. `times` are seconds by activity: data, step,
    others (waiting for other processes between passes), checkpoint, validation. `losses` are training losses by step.
    `step_bytes` is the peak memory of this process's steps including the model's weights (None: not measurable);
    `peak_bytes` is the peak of the whole process.
    """

    curve: list[dict[str, Any]]
    skipped_batches: list[dict[str, Any]]
    num_tokens: int
    flops: int
    seconds: float
    times: dict[str, float]
    losses: LossCurve = field(default_factory=LossCurve)
    step_bytes: int | None = None
    peak_bytes: int = 0


def fit(
    model: nn.Module,
    task: Task,
    options: FitOptions,
    checkpoints: Checkpoints,
    progress: Progress,
    start_shares: Sequence[Tensor] | None = None,
    mesh: Mesh = ONE_PROCESS,
    watch: Watch = UNWATCHED,
) -> Fitted:
    """Fit in place; the model ends in inference mode with the averaged weights that validated best.

    The weights are mixed by `start_shares` (Descent). All processes of `mesh` call this with the same arguments and
    end with the same weights. Raises StageFailed on the fourth unusable batch, if a checkpoint cannot be written, or if
    a process has a different batch.
    """
    with kept_memory(), task.dropout.applied():
        running = _Fit(model, task, options, checkpoints, progress, start_shares, mesh, watch)
        running.begin()
        with recomputed(running.trained, mesh.method.recompute):
            while running.at.epoch <= options.epochs:
                try:
                    running.do_epoch()
                except UnusableLoss as unusable:
                    running.skip(unusable)
        running.take_best()
    return running.fitted()


class _Fit:
    """Owns the state of one fit."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        options: FitOptions,
        checkpoints: Checkpoints,
        progress: Progress,
        start_shares: Sequence[Tensor] | None,
        mesh: Mesh,
        watch: Watch,
    ) -> None:
        self._model, self._task, self._options = model, task, options
        self._checkpoints, self._progress, self._mesh, self._watch = checkpoints, progress, mesh, watch
        self._device = next(model.parameters()).device
        self._memory = PeakMemory(self._device)
        self._parallel = parallelize(model, mesh, task.loss, task.dropout)
        self._ranks, self.trained = self._parallel.ranks, self._parallel.trained
        self._descent = Descent(
            self.trained,
            options.descent,
            start_shares,
            self._parallel.numbers,
            self._ranks,
            self._parallel.clip,
        )
        self._shards = _shard_writer(checkpoints, mesh)
        self._best: dict[str, Tensor] = {}
        self.at = Position(rng=_state_of(task.rng))

    def begin(self) -> None:
        """Resume from the newest checkpoint; write the first if there is none."""
        saved = self._checkpoints.newest(self._likes(), self._watch)
        self._ranks.wait()  # until all processes have looked for checkpoints
        if saved is None:
            self._save()
            return
        self._restore(saved)
        where = {"stage": self._checkpoints.stage, "epoch": self.at.epoch, "batch": self.at.batch}
        self._watch.note("fit_resumed", is_warning=False, **where)

    def do_epoch(self) -> None:
        """Run the rest of the epoch, then validate if due. Raises UnusableLoss."""
        self._task.rng.bit_generator.state = self.at.rng
        makes = self._task.batches()
        left_out = {entry["batch"] for entry in self.at.skipped if entry["epoch"] == self.at.epoch}
        places = [index for index in range(self.at.batch, len(makes)) if index not in left_out]
        self.trained.train()
        with ready_batches([self._signed(makes[index]) for index in places], self._device) as batches:
            for index in places:
                with self._timed("data"):
                    batch = next(batches)
                self.at.batch = index
                with self._timed("others"):
                    self._refuse_other_batches(batch)
                done = (self.at.epoch - 1 + index / len(makes)) / self._options.epochs
                began_s = time.perf_counter()
                with self._timed("step"):
                    loss = self._descent.step(self._losses(batch), done, self._max_loss, self._unit(batch))
                seconds = time.perf_counter() - began_s
                self._count(batch, loss, seconds)
                self.at.batch = index + 1
                if self._is_checkpoint_due():
                    self._save()
        self._end_epoch()

    def skip(self, unusable: UnusableLoss) -> None:
        """Return to the last checkpoint and skip this batch from then on. Raises StageFailed on the fourth."""
        skipping: dict[str, Any] = {"epoch": self.at.epoch, "batch": self.at.batch, "loss": str(unusable.loss)}
        skipping["why"] = str(unusable)
        skipped = [*self.at.skipped, skipping]
        self._watch.note("batch_skipped", stage=self._checkpoints.stage, **skipping)
        if len(skipped) > _MAX_SKIPPED:
            listed = "; ".join(f"batch {entry['batch']} of epoch {entry['epoch']}: {entry['why']}" for entry in skipped)
            raise StageFailed(
                self._checkpoints.stage,
                f"{len(skipped)} batches are unusable ({listed}); look for broken values in the data, "
                "or lower the learning rate",
            )
        if self._shards is not None:
            self._shards.wait()
        saved = self._checkpoints.newest(self._likes(), self._watch)
        if saved is None:
            raise StageFailed(self._checkpoints.stage, f"{unusable}, and no checkpoint is readable; run it again")
        self._restore(saved)
        self.at.skipped = skipped

    def take_best(self) -> None:
        """Load the weights that validated best."""
        self._report_wait()
        if self._shards is not None:
            self._shards.wait()
        self.trained.load_state_dict(self._best)
        if self._task.on_fitted is not None:
            self._task.on_fitted(self._parallel)
        self._parallel.take_over()
        self._model.eval()

    def fitted(self) -> Fitted:
        """Return the outcome of the fit."""
        at, step_bytes = self.at, self._memory.bytes
        if step_bytes is not None and self.trained is self._model:  # the weights were allocated earlier
            step_bytes += sum(value.numel() * value.element_size() for value in self._model.parameters())
        return Fitted(
            curve=at.curve,
            skipped_batches=at.skipped,
            num_tokens=at.num_tokens,
            flops=at.flops,
            seconds=at.seconds,
            times=at.times,
            losses=at.losses,
            step_bytes=step_bytes,
            peak_bytes=self._memory.of_process,
        )

    @property
    def _max_loss(self) -> float:
        return _SPIKE * self._task.uniform_loss

    def _refuse_other_batches(self, batch: Batch) -> None:
        """Raise StageFailed in all processes if any is about to use a different batch or different random numbers."""
        if differing := self._ranks.difference((self.at.epoch, self.at.batch), batch, self._task.rng):
            raise StageFailed(
                self._checkpoints.stage,
                f"at batch {self.at.batch} of epoch {self.at.epoch} {differing}; give all ranks the same files, seed "
                "and checkpoint, and run again",
            )

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began_s = time.perf_counter()
        is_between = name in _BETWEEN
        if is_between:
            self._memory.note()
        try:
            with named("communication" if name == "others" else name):
                yield
        finally:
            self.at.times[name] += time.perf_counter() - began_s
            if is_between:
                self._memory.begin()

    def _report_wait(self) -> None:
        times = self.at.times
        steps_s = times["data"] + times["others"] + times["step"]
        if steps_s > _LONG_FIT_S and times["data"] > _LONG_WAIT * steps_s:
            share = round(times["data"] / steps_s, 2)
            self._watch.note("steps_wait_for_data", stage=self._checkpoints.stage, share=share)

    def _losses(self, batch: Batch) -> Iterator[Loss]:
        method, unit = self._mesh.method, self._unit(batch)
        parts = list(split_batch(batch, self._options.num_parts * method.accumulation))
        for number, part in enumerate(parts, start=1):
            with torch.autocast(self._device.type, torch.bfloat16, enabled=method.uses_bf16(self._device)):
                with named("forward"):
                    loss = self._parallel.loss(part, unit, is_last=number == len(parts))
                yield loss

    def _unit(self, batch: Batch) -> int | None:
        """Return the batch's number of positions, which all ranks know; None in a single process."""
        return sum(batch.lengths) if self._mesh.world_size > 1 else None

    def _signed(self, make: MakeBatch) -> MakeBatch:
        """Return a builder of the same batch, with its digest if ranks compare their batches."""
        return (lambda: make().signed()) if self._mesh.world_size > 1 else make

    def _is_checkpoint_due(self) -> bool:
        """Return whether to save now; ranks that all write a checkpoint decide as rank 0 does."""
        is_due = self._checkpoints.is_due()
        return bool(self._ranks.from_main(lambda: float(is_due))) if self._mesh.is_divided else is_due

    def _count(self, batch: Batch, loss: float, seconds: float) -> None:
        self.at.total_loss += loss
        self.at.seconds += seconds
        self.at.losses.add(loss)
        measured = {"loss": loss, "gradient_norm": self._descent.grad_norm, "learning_rate": self._descent.rate}
        measured["tokens_per_s"] = sum(batch.lengths) / max(seconds, 1e-9)
        self._watch.measured(self.at.losses.num_steps, measured)
        self.at.num_steps += 1
        self.at.num_tokens += sum(batch.lengths)
        if self._task.flops is not None:
            self.at.flops += self._task.flops(batch, self._descent.num_labels)

    def _end_epoch(self) -> None:
        at, epochs = self.at, self._options.epochs
        mean_loss = at.total_loss / max(at.num_steps, 1)
        if at.epoch % self._options.validate_every == 0 or at.epoch == epochs:
            with self._timed("validation"), self._descent.averaged(), self._parallel.whole():
                score = self._ranks.from_main(self._task.validate)
                step = at.losses.num_steps
                at.curve.append({"epoch": at.epoch, "step": step, "loss": mean_loss, "validation": score})
                self._watch.measured(step, {"validation": score})
                if score > at.best_score:
                    at.best_score = score
                    self._best = {name: value.clone() for name, value in self.trained.state_dict().items()}
            if self._task.on_validation is not None:
                self._task.on_validation(at.epoch, score)
        if self._mesh.is_main:
            self._progress(at.epoch, epochs, f"loss {mean_loss:.3f}, best validation {max(at.best_score, 0):.4f}")
        at.epoch, at.batch, at.total_loss, at.num_steps = at.epoch + 1, 0, 0.0, 0
        at.rng = _state_of(self._task.rng)

    def _save(self) -> None:
        if not self._mesh.is_main and self._shards is None:
            return
        tensors = {f"model.{name}": value for name, value in self.trained.state_dict().items()}
        tensors |= {f"best.{name}": value for name, value in self._best.items()}
        tensors |= {f"descent.{name}": value for name, value in self._descent.tensors().items()}
        tensors["rng.cpu"] = torch.get_rng_state()
        if self._device.type == "cuda":
            tensors["rng.cuda"] = torch.cuda.get_rng_state(self._device)
        with self._timed("checkpoint"):
            (self._shards or self._checkpoints).save(FitState(tensors, asdict(self.at)))

    def _likes(self) -> Like:
        """Return a `Like` over the model's and optimizer's tensors."""
        weights = self.trained.state_dict()

        def like(name: str) -> Tensor | None:
            kind, _, rest = name.partition(".")
            if kind == "descent":
                return self._descent.like(rest)
            return None if kind == "rng" else weights.get(rest, ELSEWHERE)

        return like

    def _restore(self, saved: FitState) -> None:
        self.at = Position.read(saved.values)
        like = self._likes()
        tensors = {
            name: value if (alike := like(name)) is None else placed(value, alike)
            for name, value in saved.tensors.items()
            if like(name) is not ELSEWHERE
        }
        self.trained.load_state_dict(_under("model.", tensors))
        self._best = _under("best.", tensors)
        self._descent.load(_under("descent.", tensors))
        torch.set_rng_state(saved.tensors["rng.cpu"])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(saved.tensors["rng.cuda"], self._device)


def _shard_writer(checkpoints: Checkpoints, mesh: Mesh) -> "ShardWriter | None":
    """Return a writer of a state that no process holds whole; None if rank 0 holds it."""
    if not mesh.is_divided:
        return None
    from pipelines.training.fit.shard_writer import ShardWriter

    return ShardWriter(checkpoints, is_main=mesh.is_main)


def _under(prefix: str, tensors: Any) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _state_of(rng: np.random.Generator) -> dict[str, Any]:
    return dict(rng.bit_generator.state)
