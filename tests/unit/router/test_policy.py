"""The policy over all combinations of facts, at their boundaries."""

import itertools
from typing import Any

import pytest

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


def test_the_plan_is_the_first_rule_that_applies_over_all_facts() -> None:
    """Every combination of facts, at its limit and one past it, gets the first matching rule of a plain list, and every reason occurs."""
    seen: set[Reason | None] = set()
    both = (True, False)
    times = ((0.1, 0.1), (0.11, 0.1), (0.0, 0.0))
    asks = (None, Tier.SIMILAR, Tier.POPULAR)
    models = ((True, True, True), (True, True, False), (True, False, True), (True, False, False), (False, False, True))
    masks = ((0, 0), (0, 9), (9, 9))
    kinds = itertools.product(masks, asks, both, both, both, both, (0, 2, 3), both, both, (0, 8), times, models)
    for allowed, asked, covers, shed, unavailable, known, history, pays, breaker, flight, (
        predicted_s,
        budget_s,
    ), (trained, llm, student) in kinds:
        case = Facts(
            num_allowed=allowed[0],
            num_allowed_if_seen=allowed[1],
            asked=asked,
            list_covers=covers,
            is_shed=shed,
            features_unavailable=unavailable,
            user_known=known,
            num_history=history,
            min_history_for_llm=3,
            llm_allowed=llm,
            student_allowed=student,
            is_trained=trained,
            llm_pays=pays,
            breaker_allows=breaker,
            num_in_flight=flight,
            max_in_flight=8,
            predicted_s=predicted_s,
            budget_s=budget_s,
        )
        refusals = [
            (unavailable, Tier.STUDENT, Reason.FEATURES_UNAVAILABLE),
            (not llm, Tier.STUDENT, Reason.NOT_ON_SURFACE),
            (history < 3, Tier.STUDENT, Reason.SHORT_HISTORY),
            (not pays, Tier.STUDENT, Reason.STUDENT_SUFFICES),
            (not breaker, Tier.STUDENT, Reason.LLM_UNAVAILABLE),
            (flight >= 8, Tier.STUDENT, Reason.LLM_OVERLOADED),
            (predicted_s > budget_s or not budget_s, Tier.STUDENT, Reason.LLM_TOO_SLOW),
        ]
        is_refused = any(applies for applies, _, _ in refusals)
        rules = [
            (allowed == (0, 0), Tier.POPULAR, Reason.NOTHING_ALLOWED),
            (allowed[0] == 0, Tier.POPULAR, Reason.EVERYTHING_SEEN),
            (asked is Tier.SIMILAR, Tier.SIMILAR, Reason.SIMILAR_ASKED),
            (asked is Tier.POPULAR, Tier.POPULAR, Reason.POPULAR_ASKED),
            (shed, Tier.POPULAR, Reason.SHED),
            (not trained, Tier.POPULAR, Reason.NOT_TRAINED),
            (covers, Tier.PRECOMPUTED, Reason.PRECOMPUTED_FRESH),
            (history == 0 and unavailable, Tier.POPULAR, Reason.FEATURES_UNAVAILABLE),
            (history == 0 and known, Tier.POPULAR, Reason.SHORT_HISTORY),
            (history == 0, Tier.POPULAR, Reason.UNKNOWN_USER),
            (is_refused and not student, Tier.POPULAR, Reason.NOT_ON_SURFACE),
            *refusals,
            (True, Tier.LLM, Reason.LLM_IN_TIME),
        ]
        expected = next(RoutingDecision(tier, reason) for applies, tier, reason in rules if applies)
        seen.add(expected.reason)

        assert plan(case) == expected, case
    assert seen | {failure_of(outcome) for outcome in LlmOutcome} - {None} | {Reason.STUDENT_FAILED} == set(Reason)


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (LlmOutcome.IN_TIME, None),
        (LlmOutcome.LATE, Reason.LLM_LATE),
        (LlmOutcome.OVERLOADED, Reason.LLM_OVERLOADED),
        (LlmOutcome.UNAVAILABLE, Reason.LLM_UNAVAILABLE),
        (LlmOutcome.FAILED, Reason.LLM_FAILED),
        (LlmOutcome.MISMATCH, Reason.BUNDLE_MISMATCH),
        (LlmOutcome.REFUSED, Reason.LLM_FAILED),
        (LlmOutcome.ABANDONED, Reason.LLM_FAILED),
    ],
)
def test_each_outcome_of_the_llm_has_its_reason(outcome: LlmOutcome, reason: Reason | None) -> None:
    """An answer in time is served; after any other outcome the student answers, with its reason, and popularity if that fails too."""
    planned = RoutingDecision(Tier.LLM, Reason.LLM_IN_TIME)

    assert failure_of(outcome) is reason
    assert fall_back(planned, reason) == (planned if reason is None else RoutingDecision(Tier.STUDENT, reason))
    fallen = fall_back(RoutingDecision(Tier.STUDENT, Reason.LLM_LATE), Reason.STUDENT_FAILED)
    assert fallen == RoutingDecision(Tier.POPULAR, Reason.STUDENT_FAILED)


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
