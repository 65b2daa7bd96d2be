"""The loop that fits any of our models: epochs of batches, validated now and then, the best weights kept.

The optimizer is AdamW with warm-up, cosine decay, clipped gradients and an exponential (Polyak) average of the weights, which is what gets
validated and kept. This file does not know the model, the loss or the metric: they are arguments.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipelines.runner.stage import Progress
from pipelines.training.batches import Batch

_MAX_GRAD_NORM = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DescentOptions:
    """`warm_up` is a share of all steps; `average` is the decay of the weights' average in (0, 1)."""

    learning_rate: float
    weight_decay: float
    warm_up: float
    average: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """The number of epochs, how often to validate, and the optimizer's options."""

    epochs: int
    validate_every: int
    descent: DescentOptions


class Descent:
    """Owns the optimizer and the averaged weights of one model."""

    def __init__(self, model: nn.Module, options: DescentOptions) -> None:
        self._parameters = list(model.parameters())
        self._options, self._num_steps = options, 0
        matrices = [parameter for parameter in self._parameters if parameter.dim() > 1]
        vectors = [parameter for parameter in self._parameters if parameter.dim() <= 1]
        self._optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            betas=(0.9, 0.98),
            fused=True,
        )
        self._average = [parameter.detach().clone() for parameter in self._parameters]

    def step(self, loss: Tensor, progress: float) -> None:
        """Do one optimizer step and update the average. `progress` in [0, 1) is the share of the whole descent that is done."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._options.learning_rate * rate_at(progress, self._options.warm_up)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._parameters, _MAX_GRAD_NORM)
        self._optimizer.step()
        self._num_steps += 1
        decay = min(self._options.average, (1 + self._num_steps) / (10 + self._num_steps))
        torch._foreach_lerp_(self._average, [parameter.detach() for parameter in self._parameters], 1 - decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Load the averaged weights into the model inside this block."""
        held = [parameter.detach().clone() for parameter in self._parameters]
        self._load(self._average)
        try:
            yield
        finally:
            self._load(held)

    @torch.no_grad()
    def _load(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.copy_(value)


def rate_at(progress: float, warm_up: float) -> float:
    """Return the share of the learning rate at this progress in [0, 1]: linear up, then half a cosine down to 0."""
    if progress < warm_up:
        return (progress + 1e-3) / warm_up if warm_up else 1.0
    return 0.5 * (1 + math.cos(math.pi * (progress - warm_up) / (1 - warm_up)))


def fit(
    model: nn.Module,
    *,
    batches: Callable[[], Sequence[Batch]],
    loss: Callable[[Batch], Tensor],
    validate: Callable[[], float],
    options: FitOptions,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Fit in place; the model ends in inference mode with the averaged weights that validated best. Return the curve."""
    descent = Descent(model, options.descent)
    curve: list[dict[str, Any]] = []
    best_score, best = -1.0, {}
    for epoch in range(1, options.epochs + 1):
        mean_loss = _epoch(model, descent, batches(), loss, (epoch - 1) / options.epochs, 1 / options.epochs)
        if epoch % options.validate_every == 0 or epoch == options.epochs:
            with descent.averaged():
                score = validate()
                curve.append({"epoch": epoch, "loss": mean_loss, "validation": score})
                if score > best_score:
                    best_score, best = score, {name: value.clone() for name, value in model.state_dict().items()}
        progress(epoch, options.epochs, f"loss {mean_loss:.3f}, best validation {max(best_score, 0):.4f}")
    model.load_state_dict(best)
    model.eval()
    return curve


def _epoch(
    model: nn.Module,
    descent: Descent,
    batches: Sequence[Batch],
    loss: Callable[[Batch], Tensor],
    done_before: float,
    share: float,
) -> float:
    """Go over the batches once; `done_before` and `share` place this epoch in the whole descent. Return the mean loss."""
    model.train()
    total = 0.0
    for index, batch in enumerate(batches):
        batch_loss = loss(batch)
        descent.step(batch_loss, done_before + share * index / len(batches))
        total += float(batch_loss.detach())
    return total / len(batches)


@contextmanager
def dropout_after(modules: Iterable[nn.Module], probability: float) -> Iterator[None]:
    """Inside this block, apply dropout to these modules' outputs while they are in training mode; serving's model has none."""

    def drop(module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        return functional.dropout(output, probability, training=module.training)

    handles = [module.register_forward_hook(drop) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
