"""Deadlines are clamped, count from arrival, and keep a reserve."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.deadline import DeadlineLimits, deadline_from

LIMITS = DeadlineLimits(default_ms=200, min_ms=5, max_ms=5_000, reserve_ms=8.0)


@pytest.mark.parametrize(("requested_ms", "granted_ms"), [(None, 200), (1, 5), (5, 5), (300, 300), (60_000, 5_000)])
def test_a_deadline_is_the_default_or_the_clamped_request(requested_ms: int | None, granted_ms: int) -> None:
    """A requested deadline is clamped to the limits on both sides."""
    assert deadline_from(10.0, requested_ms, LIMITS).total_ms == granted_ms


def test_time_counts_from_arrival() -> None:
    """Time before admission counts; the budget excludes the reserve and is never negative."""
    deadline = deadline_from(10.0, 100, LIMITS)

    assert deadline.remaining_s(10.03) == pytest.approx(0.07)
    assert deadline.budget_s(10.03) == pytest.approx(0.062)
    assert deadline.remaining_s(10.2) == pytest.approx(-0.1)
    assert deadline.budget_s(10.2) == 0


def test_the_reserve_grows_with_the_lateness_of_the_process() -> None:
    """A process that runs 10 ms late at times begins to send that much earlier, within a quarter of the deadline."""
    assert deadline_from(0.0, 100, LIMITS, late_s=0.01).budget_s(0.0) == pytest.approx(0.082)
    assert deadline_from(0.0, 100, LIMITS, late_s=9.0).budget_s(0.0) == pytest.approx(0.067)


@given(st.integers(1, 60_000) | st.none(), st.floats(0, 1_000), st.floats(0, 100))
def test_the_budget_ends_before_the_deadline_and_starts_positive(
    requested_ms: int | None, reserve_ms: float, waited_s: float
) -> None:
    """For any reserve and deadline, most of the time is budget, and the budget ends before the deadline."""
    deadline = deadline_from(0.0, requested_ms, DeadlineLimits(200, 5, 5_000, reserve_ms))

    assert deadline.budget_s(0.0) >= 0.7 * deadline.remaining_s(0.0)
    assert deadline.budget_s(waited_s) <= max(0.0, deadline.remaining_s(waited_s))
