"""The policy over all combinations of facts, at their boundaries."""

import itertools
from typing import Any

import pytest

from services.contracts.features import PrecomputedList
from services.contracts.recommend import Reason, Tier
from services.router.policy import (
    ASKED,
    LlmOutcome,
    RoutingDecision,
    failure_of,
    fall_back,
    list_covers,
    list_is_fresh,
    plan,
)
from tests.support.gateway.facts import facts

BOTH = ("list_covers", "is_shed", "features_unavailable", "user_known", "llm_pays", "breaker_allows")
MODELS = ((True, True, True), (True, True, False), (True, False, True), (True, False, False), (False, False, True))
CHOICES: list[list[dict[str, Any]]] = [
    [{"num_allowed": now, "num_allowed_if_seen": seen} for now, seen in ((0, 0), (0, 9), (9, 9))],
    [{"asked": asked} for asked in (None, *ASKED)],
    [{"num_history": num, "min_history_for_llm": 3} for num in (0, 2, 3)],
    [{"num_in_flight": num, "max_in_flight": 8} for num in (0, 8)],
    [{"predicted_s": needed_s, "budget_s": left_s} for needed_s, left_s in ((0.1, 0.1), (0.11, 0.1), (0.0, 0.0))],
    [{"is_trained": is_trained, "llm_allowed": llm, "student_allowed": student} for is_trained, llm, student in MODELS],
    *([{name: is_it} for is_it in (True, False)] for name in BOTH),
]


def test_the_plan_is_the_first_rule_that_applies_over_all_facts() -> None:
    """Every combination of facts at its boundaries gets the first matching rule of a list, and every reason occurs."""
    seen: set[Reason | None] = set()
    for parts in itertools.product(*CHOICES):
        case = facts(**{name: value for part in parts for name, value in part.items()})
        refusals = [
            (case.features_unavailable, Tier.STUDENT, Reason.FEATURES_UNAVAILABLE),
            (not case.llm_allowed, Tier.STUDENT, Reason.NOT_ON_SURFACE),
            (case.num_history < 3, Tier.STUDENT, Reason.SHORT_HISTORY),
            (not case.llm_pays, Tier.STUDENT, Reason.STUDENT_SUFFICES),
            (not case.breaker_allows, Tier.STUDENT, Reason.LLM_UNAVAILABLE),
            (case.num_in_flight >= 8, Tier.STUDENT, Reason.LLM_OVERLOADED),
            (case.predicted_s > case.budget_s or not case.budget_s, Tier.STUDENT, Reason.LLM_TOO_SLOW),
        ]
        is_refused = any(applies for applies, _, _ in refusals)
        has_none = case.num_history == 0
        rules = [
            (case.num_allowed_if_seen == 0, Tier.POPULAR, Reason.NOTHING_ALLOWED),
            (case.num_allowed == 0, Tier.POPULAR, Reason.EVERYTHING_SEEN),
            *((case.asked is asked, tier, asked) for asked, tier in ASKED.items()),
            (case.is_shed, Tier.POPULAR, Reason.SHED),
            (not case.is_trained, Tier.POPULAR, Reason.NOT_TRAINED),
            (case.list_covers, Tier.PRECOMPUTED, Reason.PRECOMPUTED_FRESH),
            (has_none and case.features_unavailable, Tier.POPULAR, Reason.FEATURES_UNAVAILABLE),
            (has_none and case.user_known, Tier.POPULAR, Reason.SHORT_HISTORY),
            (has_none, Tier.POPULAR, Reason.UNKNOWN_USER),
            (is_refused and not case.student_allowed, Tier.POPULAR, Reason.NOT_ON_SURFACE),
            *refusals,
            (True, Tier.LLM, Reason.LLM_IN_TIME),
        ]
        expected = next(RoutingDecision(tier, reason) for applies, tier, reason in rules if applies)
        seen.add(expected.reason)

        assert plan(case) == expected, case
    after_ranking = {Reason.STUDENT_FAILED, Reason.WISH_NOT_READ}
    assert seen | {failure_of(outcome) for outcome in LlmOutcome} - {None} | after_ranking == set(Reason)


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
    """An answer in time is served; other outcomes fall back to the student with their reason, then to popularity."""
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
    """Any other state of the user's row, or recent items in the request, makes the list stale."""
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
    """Enough is k or all allowed items; a request for seen items needs a list that may contain them."""
    counts = {"shows_seen": False, "holds_seen": False, "num_survivors": 10, "num_allowed": 50, "k": 10, **changed}

    assert list_covers(**counts) is covers
