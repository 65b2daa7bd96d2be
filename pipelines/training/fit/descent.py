"""The optimizer of a fit: AdamW with warm-up, cosine decay, gradient clipping and a Polyak average of the weights.

The exponential average is validated and kept. A fit that starts from a trained model keeps the mean of the average and
that model's weights. Knows no epochs, data or files.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipelines.training.parallel.ranks import ONE_RANK, LossSum, RankGroup, describe_unusable
from pipelines.training.parallel.tensors import ELSEWHERE, local, placed
from pipelines.training.ranges import named

_MAX_GRAD_NORM = 1.0


class UnusableLoss(Exception):
    """A non-finite or implausible loss or gradient; the weights are as they were before this step."""

    def __init__(self, why: str, loss: float) -> None:
        super().__init__(why)
        self.loss = loss


@dataclass(frozen=True, slots=True, kw_only=True)
class DescentOptions:
    """`warm_up` is a fraction of all steps; `average` is the decay of the weights' average, in (0, 1)."""

    learning_rate: float
    weight_decay: float
    warm_up: float
    average: float


class Descent:
    """Owns the optimizer and the averaged weights of one model.

    `start_shares` has a tensor in [0, 1] per parameter that broadcasts to it: the fraction of the initial weights that
    `averaged` mixes back in (None: 0). `num_labels`, `grad_norm` and `rate` (the learning rate) describe the last step
    over all ranks. `numbers` are the parameters' indices in states and `start_shares` where the whole model has more of
    them. `clip` clips the gradients of all ranks to a norm, and returns the norm before.
    """

    def __init__(
        self,
        model: nn.Module,
        options: DescentOptions,
        start_shares: Sequence[Tensor] | None = None,
        numbers: Sequence[int] | None = None,
        ranks: RankGroup = ONE_RANK,
        clip: Callable[[Sequence[Tensor], float], Tensor] = nn.utils.clip_grad_norm_,
    ) -> None:
        self.num_labels, self.grad_norm, self.rate = 0, 0.0, 0.0
        self._ranks, self._clip = ranks, clip
        self._parameters = list(model.parameters())
        self._by_number = dict(zip(numbers or range(len(self._parameters)), self._parameters, strict=True))
        self._start_shares = [start_shares[number] for number in self._by_number] if start_shares else []
        self._start = [parameter.detach().clone() for parameter in self._parameters] if start_shares else []
        self._options, self._num_steps = options, 0
        kinds: dict[tuple[bool, bool], list[Tensor]] = defaultdict(list)
        for parameter in self._parameters:
            kinds[parameter.dim() > 1, parameter is local(parameter)].append(parameter)  # the fused step takes one kind
        self._optimizer = torch.optim.AdamW(
            [
                {"params": params, "weight_decay": options.weight_decay if is_matrix else 0.0}
                for (is_matrix, _), params in kinds.items()
            ],
            betas=(0.9, 0.98),
            fused=True,
        )
        self._average = [parameter.detach().clone() for parameter in self._parameters]

    def step(
        self,
        losses: Iterable[tuple[Tensor, int]],
        progress: float,
        max_loss: float = math.inf,
        unit: int | None = None,
    ) -> float:
        """Do one optimizer step, update the average, and return the mean loss.

        `losses` are the mean loss and number of labels of each part of the batch, or of this process's rows of it.
        `progress` in [0, 1) is the completed fraction of all steps; `unit` is the label count that scales the gradients
        of all ranks (None in a single process: that of the first part). Raises UnusableLoss in all processes before any
        weight changes.
        """
        self.rate = self._options.learning_rate * rate_at(progress, self._options.warm_up)
        for group in self._optimizer.param_groups:
            group["lr"] = self.rate
        self._optimizer.zero_grad()
        sums = self._backward(losses, unit)
        loss = sum(own.total for own in sums) / max(self.num_labels, 1)
        if not loss <= max_loss:  # which no NaN is
            where = describe_unusable(sums, max_loss)
            raise UnusableLoss(f"its loss is {loss:g}{where}, where at most {max_loss:.3g} is plausible", loss)
        self.grad_norm = float(self._clip(self._parameters, _MAX_GRAD_NORM))
        if not math.isfinite(self.grad_norm):
            raise UnusableLoss("its gradient is not finite", loss)
        with named("optimizer"):
            self._optimizer.step()
        self._num_steps += 1
        decay = min(self._options.average, (1 + self._num_steps) / (10 + self._num_steps))
        now = [local(parameter.detach()) for parameter in self._parameters]
        torch._foreach_lerp_([local(value) for value in self._average], now, 1 - decay)
        return loss

    def _backward(self, losses: Iterable[tuple[Tensor, int]], unit: int | None) -> list[LossSum]:
        """Accumulate the gradients of all parts and processes, weighted by labels; return each process's loss.

        The first part has weight 1 until the total number of labels is known.
        """
        total, num_labels, is_alone = 0.0, 0, unit is None
        for mean, number in losses:
            if not number and is_alone:  # a part without labels has no mean
                continue
            unit = unit or number
            with named("backward"):
                _backpropagate(mean * (number / unit))
            total += float(mean.detach()) * number
            num_labels += number
        sums = self._ranks.losses(LossSum(total, num_labels))
        self.num_labels = sum(own.num_labels for own in sums)
        counted = (unit or 1) * len(sums)  # weight 1 in the mean over all processes
        if self.num_labels and self.num_labels != counted:
            grads = [local(parameter.grad) for parameter in self._parameters if parameter.grad is not None]
            torch._foreach_mul_(grads, counted / self.num_labels)
        return sums

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Load the averaged weights, mixed with the initial weights, into the model inside this block."""
        held = [parameter.detach().clone() for parameter in self._parameters]
        self._load(self._average)
        if self._start_shares:
            for parameter, start, share in zip(self._parameters, self._start, self._start_shares, strict=True):
                local(parameter.data).lerp_(local(start), local(placed(share, parameter)))
        try:
            yield
        finally:
            self._load(held)

    def tensors(self) -> dict[str, Tensor]:
        """Return the whole state, except the model's weights, by name."""
        named = {f"average.{number}": value for number, value in zip(self._by_number, self._average, strict=True)}
        for number, parameter in self._by_number.items():
            named |= {f"{key}.{number}": value for key, value in self._optimizer.state.get(parameter, {}).items()}
        return named | {"num_steps": torch.tensor(self._num_steps)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load a state that `tensors` returned."""
        self._num_steps = int(tensors["num_steps"])
        self._optimizer.state.clear()
        averages = dict(zip(self._by_number, self._average, strict=True))
        for name, value in tensors.items():
            kind, _, number = name.partition(".")
            if kind == "average":
                averages[int(number)].copy_(value)
            elif number:
                parameter = self._by_number[int(number)]
                self._optimizer.state[parameter][kind] = value.to(parameter.device)

    def like(self, name: str) -> Tensor | None:
        """Return the parameter with the named tensor's layout; None if it has none, ELSEWHERE if not held here."""
        kind, _, number = name.partition(".")
        if not number:
            return None
        parameter = self._by_number.get(int(number), ELSEWHERE)
        return None if kind == "step" and parameter is not ELSEWHERE else parameter

    @torch.no_grad()
    def _load(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.copy_(value)


def _backpropagate(loss: Tensor) -> None:
    """Compute the gradients, unless a pipeline's schedule has computed them."""
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]


def rate_at(progress: float, warm_up: float) -> float:
    """Return the learning-rate factor at this progress in [0, 1]: linear warm-up, then half a cosine down to 0."""
    if progress < warm_up:
        return (progress + 1e-3) / warm_up if warm_up else 1.0
    return 0.5 * (1 + math.cos(math.pi * (progress - warm_up) / (1 - warm_up)))
