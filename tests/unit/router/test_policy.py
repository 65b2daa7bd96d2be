"""The policy over all combinations of facts, at its boundaries, and its invariants for any facts."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contracts.features import PrecomputedList
from services.contracts.recommend import Reason, Tier
from services.router.policy import (
    Facts,
    LlmOutcome,
    RoutingDecision,
    failure_of,
    fall_back,
    list_covers,
    list_is_fresh,
    plan,
)


def facts(**changed: Any) -> Facts:
    """A user with a history, a healthy idle LLM, and time enough."""
    fields: dict[str, Any] = {
        "num_allowed": 100,
        "num_allowed_if_seen": 120,
        "list_covers": False,
        "is_shed": False,
        "features_away": False,
        "user_known": True,
        "num_history": 20,
        "min_history_for_llm": 3,
        "llm_pays": True,
        "breaker_allows": True,
        "num_in_flight": 1,
        "max_in_flight": 8,
        "predicted_s": 0.05,
        "budget_s": 0.1,
    }
    return Facts(**{**fields, **changed})


@pytest.mark.parametrize(
    ("changed", "tier", "reason"),
    [
        ({"num_history": 2}, Tier.STUDENT, Reason.SHORT_HISTORY),
        ({"num_history": 2, "llm_pays": False}, Tier.STUDENT, Reason.SHORT_HISTORY),
        ({"num_history": 3, "num_in_flight": 7, "predicted_s": 0.1}, Tier.LLM, Reason.LLM_IN_TIME),
        ({"num_in_flight": 8}, Tier.STUDENT, Reason.LLM_OVERLOADED),
        ({"predicted_s": 0.11}, Tier.STUDENT, Reason.LLM_TOO_SLOW),
        ({"predicted_s": 0.0, "budget_s": 0.0}, Tier.STUDENT, Reason.LLM_TOO_SLOW),
    ],
)
def test_the_plan_at_its_boundaries(changed: dict[str, Any], tier: Tier, reason: Reason) -> None:
    """A history, a number in flight or a prediction at its limit, and one past it."""
    assert plan(facts(**changed)) == RoutingDecision(tier, reason)


def test_the_plan_is_the_first_rule_that_applies_over_all_facts() -> None:
    """Every combination of facts gets the first matching rule of a plain list, and every reason occurs."""
    seen: set[Reason | None] = set()
    both = (True, False)
    kinds = itertools.product(
        ((0, 0), (0, 9), (9, 9)), both, both, both, both, (0, 2, 3), both, both, (0, 1, 8), (0.05, 0.2)
    )
    for allowed, covers, shed, away, known, history, pays, breaker, flight, predicted_s in kinds:
        case = facts(
            num_allowed=allowed[0],
            num_allowed_if_seen=allowed[1],
            list_covers=covers,
            is_shed=shed,
            features_away=away,
            user_known=known,
            num_history=history,
            llm_pays=pays,
            breaker_allows=breaker,
            num_in_flight=flight,
            predicted_s=predicted_s,
        )
        rules = [
            (allowed == (0, 0), Tier.POPULAR, Reason.NOTHING_ALLOWED),
            (allowed[0] == 0, Tier.POPULAR, Reason.EVERYTHING_SEEN),
            (shed, Tier.POPULAR, Reason.SHED),
            (covers, Tier.PRECOMPUTED, Reason.PRECOMPUTED_FRESH),
            (history == 0 and away, Tier.POPULAR, Reason.FEATURES_AWAY),
            (history == 0 and known, Tier.POPULAR, Reason.SHORT_HISTORY),
            (history == 0, Tier.POPULAR, Reason.UNKNOWN_USER),
            (away, Tier.STUDENT, Reason.FEATURES_AWAY),
            (history < 3, Tier.STUDENT, Reason.SHORT_HISTORY),
            (not pays, Tier.STUDENT, Reason.STUDENT_SUFFICES),
            (not breaker, Tier.STUDENT, Reason.LLM_AWAY),
            (flight >= 8, Tier.STUDENT, Reason.LLM_OVERLOADED),
            (predicted_s > 0.1, Tier.STUDENT, Reason.LLM_TOO_SLOW),
            (True, Tier.LLM, Reason.LLM_IN_TIME),
        ]
        expected = next(RoutingDecision(tier, reason) for applies, tier, reason in rules if applies)
        seen.add(expected.reason)

        assert plan(case) == expected, case
    assert seen | {failure_of(outcome) for outcome in LlmOutcome} - {None} | {Reason.STUDENT_FAILED} == set(Reason)


COUNTS = st.integers(0, 3_000)
SECONDS = st.floats(0, 10) | st.just(float("inf"))
ANY_FACTS = st.builds(
    Facts,
    num_allowed=COUNTS,
    num_allowed_if_seen=COUNTS,
    list_covers=st.booleans(),
    is_shed=st.booleans(),
    features_away=st.booleans(),
    user_known=st.booleans(),
    num_history=COUNTS,
    min_history_for_llm=st.integers(1, 10),
    llm_pays=st.booleans(),
    breaker_allows=st.booleans(),
    num_in_flight=st.integers(0, 100),
    max_in_flight=st.integers(1, 100),
    predicted_s=SECONDS,
    budget_s=SECONDS,
)


@given(ANY_FACTS)
def test_the_llm_is_chosen_only_when_it_can_answer(case: Facts) -> None:
    """Never without time, places, features or enough history, and never while the breaker is open."""
    route = plan(case)

    if route.tier is Tier.LLM:
        assert case.breaker_allows
        assert not case.features_away
        assert case.num_in_flight < case.max_in_flight
        assert case.llm_pays
        assert case.num_history >= case.min_history_for_llm
        assert 0 < case.budget_s >= case.predicted_s


@given(ANY_FACTS, st.sampled_from(LlmOutcome), st.booleans())
def test_every_request_ends_at_a_tier_that_can_answer(case: Facts, outcome: LlmOutcome, student_ranked: bool) -> None:
    """Whatever fails, each tier has a fallback and the last one cannot fail."""
    route = plan(case)
    if route.tier is Tier.LLM:
        route = fall_back(route, failure_of(outcome))
    if route.tier is Tier.STUDENT and not student_ranked:
        route = fall_back(route, Reason.STUDENT_FAILED)

    assert route.tier is not Tier.LLM or outcome is LlmOutcome.IN_TIME
    assert route.tier is not Tier.STUDENT or student_ranked
    assert route.tier is not Tier.PRECOMPUTED or case.list_covers


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (LlmOutcome.IN_TIME, None),
        (LlmOutcome.LATE, Reason.LLM_LATE),
        (LlmOutcome.OVERLOADED, Reason.LLM_OVERLOADED),
        (LlmOutcome.AWAY, Reason.LLM_AWAY),
        (LlmOutcome.FAILED, Reason.LLM_FAILED),
        (LlmOutcome.MISMATCH, Reason.BUNDLE_MISMATCH),
        (LlmOutcome.REFUSED, Reason.LLM_FAILED),
        (LlmOutcome.ABANDONED, Reason.LLM_FAILED),
    ],
)
def test_each_outcome_of_the_llm_has_its_reason(outcome: LlmOutcome, reason: Reason | None) -> None:
    """An answer in time is served; after any other outcome the student answers, with the reason of the outcome."""
    planned = RoutingDecision(Tier.LLM, Reason.LLM_IN_TIME)

    assert failure_of(outcome) is reason
    assert fall_back(planned, reason) == (planned if reason is None else RoutingDecision(Tier.STUDENT, reason))


LIST = PrecomputedList(item_ids=("a",), scores=(1.0,), bundle_version="v1", made_from_row_us=100)


@pytest.mark.parametrize(
    ("changed", "is_fresh"),
    [
        ({}, True),
        ({"row_us": 101}, False),
        ({"row_us": 99}, False),
        ({"row_us": None}, False),
        ({"has_recent_items": True}, False),
    ],
)
def test_a_list_is_fresh_until_the_row_moves(changed: dict[str, Any], is_fresh: bool) -> None:
    """Another state of the user's row, an older or a lost one too, or items sent along make it stale."""
    current = {"row_us": 100, "has_recent_items": False, **changed}

    assert list_is_fresh(LIST, **current) is is_fresh


@pytest.mark.parametrize(
    ("changed", "covers"),
    [
        ({}, True),
        ({"num_survivors": 9}, False),
        ({"num_survivors": 9, "num_allowed": 9}, True),
        ({"shows_seen": True}, False),
        ({"shows_seen": True, "holds_seen": True}, True),
        ({"holds_seen": True}, True),
    ],
)
def test_a_list_covers_a_request_when_enough_of_it_is_left(changed: dict[str, Any], covers: bool) -> None:
    """Enough is k or all allowed items; a request that shows seen items is covered only by a list that may hold them."""
    counts = {"shows_seen": False, "holds_seen": False, "num_survivors": 10, "num_allowed": 50, "k": 10, **changed}

    assert list_covers(**counts) is covers
