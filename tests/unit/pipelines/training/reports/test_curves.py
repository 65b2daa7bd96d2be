"""Loss curves as a picture and as text."""

from dataclasses import asdict
from pathlib import Path

from pipelines.training.fit.fitting import Fitted
from pipelines.training.fit.loss_curve import LossCurve
from pipelines.training.reports.curves import CURVES, as_text, write_png


def fitted(losses: list[float], scores: list[float]) -> Fitted:
    """Build a fit with these losses by step and a validation score every ten steps."""
    curve = [{"epoch": epoch, "step": 10 * epoch, "validation": score} for epoch, score in enumerate(scores, start=1)]
    return Fitted(
        curve=curve, skipped_batches=[], num_tokens=0, flops=0, seconds=0.0, times={}, losses=LossCurve(means=losses)
    )


def test_the_text_shows_where_both_curves_run() -> None:
    """Losses and scores are plotted next to each other on separate scales, falling and rising."""
    lines = as_text(asdict(fitted([9.0 - step / 10 for step in range(30)], [0.1, 0.2, 0.3]))).splitlines()

    assert "training loss" in lines[0]
    assert "validation" in lines[0]
    middle = lines[0].index("(validation)")
    drawn = [[column for column, mark in enumerate(line) if "⠀" < mark <= "⣿"] for line in lines]
    left = [column for line in drawn for column in line if column < middle]
    right = [column for line in drawn for column in line if column >= middle]
    assert left == sorted(left)
    assert right != sorted(right)
    assert all(len(line) < 100 for line in lines)


def test_a_fit_of_one_step_or_none_is_drawn_too(tmp_path: Path) -> None:
    """Fits with one step or none are drawn without an error."""
    for fit in (fitted([5.0], [0.1]), fitted([], [])):
        assert as_text(asdict(fit))
        write_png({"decoder": fit}, tmp_path / CURVES)
