"""The polls of resident names: each in its interval, and spread over it."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.residency.turns import PollTurns

INTERVAL_S = 10.0
STEPS = st.lists(st.tuples(st.floats(0.0, 15.0), st.sampled_from("abcdefgh")), min_size=1, max_size=30)


def polls(turns: PollTurns, from_s: float, to_s: float) -> list[tuple[float, str]]:
    """Return the polls of a time span, taken at their times."""
    taken = []
    while (now_s := max(turns.next_s, from_s)) <= to_s:
        name = turns.take(now_s)
        assert name is not None
        assert turns.take(now_s) is None, "two polls at once"
        taken.append((now_s, name))
    return taken


@given(STEPS)
def test_a_name_is_polled_in_each_interval_from_its_load_on(steps: list[tuple[float, str]]) -> None:
    """However names load and unload, no name waits longer than an interval and the pause after a late poll."""
    turns, now_s = PollTurns(INTERVAL_S), 0.0
    seen_s: dict[str, float] = {}
    for pause_s, name in steps:
        for at_s, polled in polls(turns, now_s, now_s + pause_s):
            assert at_s - seen_s[polled] <= 1.5 * INTERVAL_S
            seen_s[polled] = at_s
        now_s += pause_s
        assert all(now_s - at_s <= 1.5 * INTERVAL_S for at_s in seen_s.values())
        if name in seen_s:
            turns.remove(name)
            del seen_s[name]
        else:
            turns.add(name, now_s)
            seen_s[name] = now_s


def test_the_first_poll_of_a_name_is_within_an_interval() -> None:
    """A name that loads between the polls of others does not wait for all of them twice."""
    turns = PollTurns(INTERVAL_S)
    for number in range(50):
        turns.add(f"early {number}", 0.1 * number)
    polls(turns, 5.0, 99.0)
    turns.add("late", 99.0)

    assert "late" in [name for _, name in polls(turns, 99.0, 109.0)]


def test_polls_of_names_that_load_at_once_are_spread() -> None:
    """Fifty names that load at one time are polled one after another, in each interval."""
    turns = PollTurns(INTERVAL_S)
    for number in range(50):
        turns.add(str(number), 0.0)
    taken = polls(turns, 0.0, 20.0)
    pauses = [later - earlier for (earlier, _), (later, _) in pairwise(taken)]

    assert len(taken) == pytest.approx(100, abs=1)
    assert min(pauses) >= INTERVAL_S / 50 / 2 - 1e-9


def test_late_polls_are_spread() -> None:
    """After a pause of the process, the polls that are due come one after another, not all at once."""
    turns = PollTurns(INTERVAL_S)
    for number in range(50):
        turns.add(str(number), 0.0)
    taken = polls(turns, 1_000.0, 1_005.0)

    assert len(taken) == pytest.approx(50, abs=1)
    assert len({name for _, name in taken}) == len(taken)
