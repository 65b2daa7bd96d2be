"""When a failing store is asked. Run: pytest tests/unit/features/test_away_gate.py."""

from services.features.away_gate import AwayGate


def test_single_failures_do_not_close_the_gate() -> None:
    """One slow read blinds no other request; a success starts the count anew."""
    gate = AwayGate(num_failures=3, pause_s=1.0)
    for outcome in (gate.failed, gate.failed):
        outcome(0.0)
    gate.succeeded()
    gate.failed(0.0)

    assert gate.may_try(0.0)


def test_after_failures_in_a_row_one_attempt_a_pause_goes_through() -> None:
    """The closed gate lets one request probe, and says no to the others until the next pause."""
    gate = AwayGate(num_failures=2, pause_s=1.0)
    gate.failed(0.0)
    gate.failed(0.0)

    assert [gate.may_try(now_s) for now_s in (0.5, 1.0, 1.1, 2.0, 2.1)] == [False, True, False, True, False]


def test_one_success_opens_the_gate() -> None:
    """When the probe gets through, everybody does."""
    gate = AwayGate(num_failures=1, pause_s=1.0)
    gate.failed(0.0)

    gate.succeeded()

    assert gate.may_try(0.0)
