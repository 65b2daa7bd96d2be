"""Who answers at the doors: `pytest tests/unit/infra/test_handover.py`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.local.standby.handover import RETURN_LOOKS, Duty, Main, advance

AWAY = st.sampled_from([Main.GONE, Main.UNWELL])
LOOKS = st.lists(st.sampled_from(list(Main)), max_size=40)


def after(looks: list[Main]) -> Duty:
    """The state after these looks."""
    duty = Duty()
    for main in looks:
        duty = advance(duty, main)
    return duty


def test_until_haproxy_was_seen_the_standby_answers() -> None:
    """Nobody else is known when it starts, be it before Ray or while Ray is starting again."""
    assert Duty().is_on


@given(LOOKS, AWAY)
def test_one_bad_look_is_enough_to_take_over(looks: list[Main], away: Main) -> None:
    """Whatever came before."""
    assert after([*looks, away]).is_on


@given(LOOKS)
def test_it_hands_back_after_good_looks_in_a_row_and_not_before(looks: list[Main]) -> None:
    """Against the obvious: the last looks of all were good, or it was handed back before and nothing bad came since."""
    since_bad = 0
    for main in looks:
        since_bad = since_bad + 1 if main is Main.WELL else 0

    assert after(looks).is_on is (since_bad < RETURN_LOOKS)


@pytest.mark.parametrize("num_good", range(1, RETURN_LOOKS))
def test_a_haproxy_that_flickers_gets_nothing(num_good: int) -> None:
    """Good looks between bad ones do not add up."""
    assert after([*[Main.WELL] * num_good, Main.UNWELL] * 5).is_on
