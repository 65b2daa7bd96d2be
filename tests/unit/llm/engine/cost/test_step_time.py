"""Steps are sized by measured speed, on a simulated device with a fixed time per step and a time per row."""

import pytest

from services.llm.engine.cost.step_time import StepTime

LIMIT = 1_024


def run(step_time: StepTime, num_steps: int, *, pass_s: float, row_s: float, num_rows: int = LIMIT) -> list[float]:
    """Run steps of up to `num_rows` rows; return their times."""
    times = []
    for _ in range(num_steps):
        rows = min(num_rows, step_time.max_rows() or LIMIT)
        times.append(pass_s + rows * row_s)
        step_time.record(rows, times[-1])
    return times


@pytest.mark.parametrize(
    ("pass_s", "row_s", "longest_s"),
    [
        pytest.param(0.05, 13 / LIMIT, 1.0, id="13 s for 1,024 tokens"),
        pytest.param(0.3, 0.2, 0.3 + 16 * 0.2, id="too slow for the target: the fewest rows"),
        pytest.param(2.0, 0.001, 4.0, id="a large model: no longer than two decode steps"),
    ],
)
def test_a_step_on_a_slow_device_takes_the_target_at_most(pass_s: float, row_s: float, longest_s: float) -> None:
    """After decode steps and a few prompts, steps stay within the target and are not needlessly short."""
    step_time = StepTime(1.0)
    run(step_time, 5, pass_s=pass_s, row_s=row_s, num_rows=1)

    times = run(step_time, 20, pass_s=pass_s, row_s=row_s)

    assert max(times) <= max(longest_s, pass_s + 32 * row_s) * 1.01
    assert times[-1] > 0.8 * min(longest_s, pass_s + LIMIT * row_s)
    assert step_time.predicted_s(100) >= pass_s + 100 * row_s


def test_a_fast_device_is_bounded_by_the_configured_limit_only() -> None:
    """A fast device is not limited by the target, and a single slow step does not change that."""
    step_time = StepTime(1.0)
    run(step_time, 3, pass_s=0.01, row_s=0.0004)
    step_time.record(100, 60.0)

    assert StepTime(None).max_rows() is None
    assert (step_time.max_rows() or 0) >= LIMIT


def test_a_device_that_becomes_slower_gets_smaller_steps() -> None:
    """Steps shrink within a few steps when the device slows down, and grow again when it recovers."""
    step_time = StepTime(1.0)
    run(step_time, 10, pass_s=0.01, row_s=0.001)

    assert run(step_time, 10, pass_s=0.1, row_s=0.05)[-1] < 1.1
    assert run(step_time, 20, pass_s=0.01, row_s=0.001)[-1] > 0.8
