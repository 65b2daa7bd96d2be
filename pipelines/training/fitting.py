"""The loop that fits any of our models: epochs of batches, judged on validation now and then, the best weights kept.

It does not know the model, the loss or the metric: they are handed in.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pipelines.runner.progress import Progress
from pipelines.training.batches import Batch
from pipelines.training.descent import Descent, DescentOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """How long to go down and how often to look."""

    epochs: int
    validate_every: int
    descent: DescentOptions


def fit(
    model: nn.Module,
    *,
    batches: Callable[[], Sequence[Batch]],
    loss: Callable[[Batch], Tensor],
    validate: Callable[[], float],
    options: FitOptions,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Fit in place; the model ends in inference mode with the averaged weights that validated best. Gives the curve."""
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
    begun: float,
    share: float,
) -> float:
    """Go over the batches once; `begun` and `share` place this epoch in the whole descent. Gives the mean loss."""
    model.train()
    total = 0.0
    for index, batch in enumerate(batches):
        batch_loss = loss(batch)
        descent.step(batch_loss, begun + share * index / len(batches))
        total += float(batch_loss.detach())
    return total / len(batches)
