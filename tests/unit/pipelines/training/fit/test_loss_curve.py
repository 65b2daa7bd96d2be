"""The training loss by step, kept in bounded memory."""

import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.training.fit.loss_curve import MAX_POINTS, LossCurve


@given(num_steps=st.integers(1, 5 * MAX_POINTS), stops=st.sets(st.integers(1, 5 * MAX_POINTS), max_size=3))
def test_points_are_means_of_all_steps_in_their_order(num_steps: int, stops: set[int]) -> None:
    """Points are means of consecutive steps within the limit, also after a JSON round trip."""
    losses, curve = [float(step * step % 997) for step in range(num_steps)], LossCurve()
    for step, loss in enumerate(losses):
        if step in stops:
            curve = LossCurve(**json.loads(json.dumps(asdict(curve))))
        curve.add(loss)

    points, before = curve.points(), 0
    assert len(points) <= MAX_POINTS
    assert points[-1][0] == curve.num_steps == num_steps
    for step, mean in points:
        assert mean == pytest.approx(sum(losses[before:step]) / (step - before))
        before = step
