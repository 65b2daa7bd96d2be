"""A period. Run: pytest tests/unit/stream/test_timer.py."""

from services.stream.timer import Timer


def test_due_once_a_period() -> None:
    """Not at first, then once when the period is over, then after the next one."""
    times = iter([0.0, 0.5, 1.0, 1.5, 2.5])
    timer = Timer(1.0, clock=lambda: next(times))

    assert [timer.due() for _ in range(4)] == [False, True, False, True]
