"""Loss curves: training loss and validation by step, as PNG (matplotlib) and as terminal text (plotille).

Both libraries load lazily.
"""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pipelines.training.fit.fitting import Fitted
from pipelines.training.fit.loss_curve import LossCurve

CURVES = "curves.png"
_WIDTH, _HEIGHT = 24, 6
"""Size of a terminal plot, in characters."""

Points = Sequence[tuple[int, float]]


def write_png(fits: Mapping[str, Fitted], path: Path) -> None:
    """Draw the fits' training losses above their validation scores, by step.

    Raises OSError if the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
    for name, fitted in fits.items():
        above.plot(*_columns(fitted.losses.points()), label=name, linewidth=1)
        below.plot(*_columns(_validations(fitted.curve)), label=name, marker="o")
    above.set_ylabel("training loss")
    below.set_ylabel("validation NDCG@10")
    below.set_xlabel("step")
    above.legend()
    figure.savefig(path, format="png", dpi=120)


def as_text(about: Mapping[str, Any]) -> str:
    """Return both curves of a fit side by side; `about` has its `curve` and `losses`, as in training.json."""
    losses = LossCurve(**about["losses"]).points()
    left, right = _plot(losses, "training loss"), _plot(_validations(about["curve"]), "validation")
    width = max(map(len, left))
    return "\n".join(f"{line:<{width}}  {other}".rstrip() for line, other in zip_longest(left, right, fillvalue=""))


def _validations(curve: Sequence[Mapping[str, Any]]) -> Points:
    return [(point["step"], point["validation"]) for point in curve]


def _columns(points: Points) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [value for _, value in points]


def _plot(points: Points, name: str) -> list[str]:
    from plotille import Figure

    def label(value: float, chars: int, delta: float, left: bool = False) -> str:  # signature of plotille
        return f"{value:.4g}".ljust(chars) if left else f"{value:.4g}".rjust(chars)

    steps, values = _columns(points)
    low, high = min(values, default=0.0), max(values, default=0.0)
    margin = 0.05 * (high - low) or 0.1 * abs(high) or 0.5
    figure = Figure()
    figure.width, figure.height, figure.with_colors, figure.origin = _WIDTH, _HEIGHT, False, False
    figure.x_label, figure.y_label = "step", name
    figure.set_x_limits(min_=0, max_=1.02 * max(steps, default=1))
    figure.set_y_limits(min_=low - margin, max_=high + margin)
    for kind in (int, float):
        figure.register_label_formatter(kind, label)
    (figure.plot if len(points) > 1 else figure.scatter)(steps, values)
    return str(figure.show()).splitlines()
