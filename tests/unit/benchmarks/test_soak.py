"""The soak benchmark: growth with its interval, and the accounting of every event."""

import random

import pytest

from benchmarks.soak.ledger import Ledger, account_for
from benchmarks.soak.report import growth_row, slope_of
from services.contracts.events import Interaction
from services.features.schema import LogPosition
from services.stream.aggregate import HistoryLimits, apply
from services.stream.decode import LoggedInteraction

LIMITS = HistoryLimits(max_items=8)


def test_a_restart_is_no_growth_and_a_leak_is() -> None:
    """A leak of 360 MB per hour exceeds the bound of 60; a restart without a leak does not count as growth."""
    noise = random.Random(1)

    def series(leak_mb_per_s: float) -> list[list[tuple[float, float]]]:
        """Return samples of two process lifetimes; the second starts smaller."""
        lives = ((0, 300.0), (600, 200.0))
        return [
            [(t, at + leak_mb_per_s * (t - begin) + noise.gauss(0, 1)) for t in range(begin, begin + 600, 5)]
            for begin, at in lives
        ]

    leaking, calm = growth_row("gateway", "memory MB", series(0.1), 60.0), slope_of(series(0.0))

    assert leaking["verdict"] == "broken"
    assert leaking["per_hour"] == pytest.approx(360, abs=20)
    assert calm is not None
    assert calm.low < 0 < calm.high < 60
    assert (calm.verdict(60.0), slope_of([[(0.0, 1.0), (5.0, 1.0)]])) == ("holds", None)


def logged(event_id: str, offset: int) -> LoggedInteraction:
    """Build an event of user u in the log."""
    event = Interaction(event_id=event_id, user_id="u", item_id=f"item-{event_id}", event_time_ms=1_000 + offset)
    return LoggedInteraction(event, LogPosition("topic", 0, offset))


@pytest.mark.parametrize(
    ("applied", "in_log", "lost", "doubled"),
    [("abc", "abbc", 0, 0), ("abcb", "abc", 0, 1), ("ab", "abc", 1, 0), ("ab", "ab", 1, 0)],
    ids=["exact, one sent twice", "doubled", "not in the row", "not in the log"],
)
def test_events_are_accounted_for(applied: str, in_log: str, lost: int, doubled: int) -> None:
    """An acknowledged event must be in the log, and exactly once in the row, even if it was sent twice."""
    log = [logged(name, offset) for offset, name in enumerate(in_log)]
    forgetful = HistoryLimits(LIMITS.max_items, max_event_ids=1)
    row = apply(None, [logged(name, offset).event for offset, name in enumerate(applied)], forgetful).row
    assert row is not None

    account = account_for(Ledger(acknowledged={"a", "b", "c"}), log, {"u": row}, LIMITS)

    assert (account.num_lost, account.num_doubled) == (lost, doubled)
