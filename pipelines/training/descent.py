"""How any of our models descends: AdamW, warm-up then cosine, clipped gradients, and an average of the weights.

The average (Polyak; exponential, its memory growing with the steps) is what gets judged and kept. This file does not know
what is being learned.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_MAX_GRAD_NORM = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DescentOptions:
    """`warm_up` is a share of all steps; `average` is the decay of the weights' average in (0, 1)."""

    learning_rate: float
    weight_decay: float
    warm_up: float
    average: float


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
        """Go one step down, and move the average. `progress` in [0, 1) is how much of the whole descent is done."""
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
        """Let the model carry the averaged weights inside this block."""
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
