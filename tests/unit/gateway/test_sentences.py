"""Explanations in words: every reason has a sentence, every number in it is the fact's."""

from dataclasses import fields
from typing import Any

import pytest

from services.contracts.explanation import Explanation, LlmPart, StageTime
from services.contracts.recommend import Reason, Tier
from services.gateway.records.describe import longest_stage, sentences, why
from services.router.policy import Facts, LlmOutcome, after_llm, after_student, plan

FACTS: dict[str, Any] = {
    "num_allowed": 10,
    "num_allowed_if_seen": 10,
    "list_covers": False,
    "is_shed": False,
    "features_away": False,
    "user_known": True,
    "num_history": 5,
    "min_history_for_llm": 3,
    "breaker_allows": True,
    "num_in_flight": 2,
    "max_in_flight": 8,
    "predicted_s": 0.0123,
    "trial_s": 0.001,
    "budget_s": 0.05,
}
CHANGES: list[tuple[dict[str, Any], str]] = [
    ({}, "predicted to need 12.3 ms of the 50.0 ms"),
    ({"num_in_flight": 0}, "predicted to need 1.0 ms of the 50.0 ms"),
    ({"list_covers": True}, "has seen every event"),
    ({"num_history": 2}, "2 known items are too few for the LLM, which is asked from 3 on"),
    ({"num_history": 0}, "0 known items"),
    ({"num_history": 0, "user_known": False}, "Nothing is known"),
    ({"num_in_flight": 8}, "All 8 places"),
    ({"predicted_s": 0.2}, "predicted to need 200.0 ms and only 50.0 ms were left"),
    ({"breaker_allows": False}, "breaker was open"),
    ({"features_away": True}, "feature store did not answer"),
    ({"is_shed": True}, "shed this caller's class"),
    ({"num_allowed": 0}, "seen every item"),
    ({"num_allowed": 0, "num_allowed_if_seen": 0}, "leave no item"),
]


def explanation(**changes: Any) -> Explanation:
    """An answered request of 12 ms."""
    given: dict[str, Any] = {
        "request_id": "r",
        "door": "rest",
        "outcome": "ok",
        "at_unix_ms": 1_800_000_000_000,
        "caller": "shop",
        "priority": "high",
        "tier": "llm",
        "reason": "llm_in_time",
        "planned_tier": "llm",
        "planned_reason": "llm_in_time",
        "bundle_version": "v1",
        "k": 3,
        "num_items": 3,
        "deadline_ms": 200,
        "elapsed_ms": 12.0,
        "feature_age_ms": 5_000,
        "list_state": "none",
        "facts": FACTS,
    }
    return Explanation(**{**given, **changes})


@pytest.mark.parametrize(("changes", "words"), CHANGES)
def test_each_decision_says_the_fact_that_decided(changes: dict[str, Any], words: str) -> None:
    """The policy's own decision over these facts is put into words that hold them."""
    facts = {**FACTS, **changes}
    route = plan(Facts(**facts))
    told = explanation(
        facts=facts,
        tier=route.tier.value,
        reason=route.reason.value,
        planned_tier=route.tier.value,
        planned_reason=route.reason.value,
    )

    assert words in why(told)


@pytest.mark.parametrize("outcome", [one for one in LlmOutcome if one is not LlmOutcome.ABANDONED])
@pytest.mark.parametrize("student_ranked", [True, False])
def test_each_end_has_words(outcome: LlmOutcome, student_ranked: bool) -> None:
    """However asking the LLM ended and whether or not the student could rank."""
    route = after_student(after_llm(outcome), student_ranked=student_ranked)

    assert why(explanation(tier=route.tier.value, reason=route.reason.value))


def test_the_facts_here_are_the_policys() -> None:
    """No fact is forgotten in these tests."""
    assert set(FACTS) == {one.name for one in fields(Facts)}


def test_a_whole_story_reads_well() -> None:
    """The tier and the reason first, then the LLM's numbers, the deadline, the longest stage and the age."""
    told = sentences(
        explanation(
            llm=LlmPart(
                outcome="in_time",
                num_prompt_tokens=201,
                num_cached_tokens=192,
                num_steps=1,
                queue_ms=0.4,
                compute_ms=6.0,
                decode_ms=0.0,
            ),
            stages=(
                StageTime(name="features", offset_ms=0.5, duration_ms=1.0),
                StageTime(name="rank", offset_ms=2.0, duration_ms=9.1),
                StageTime(name="llm", offset_ms=2.0, duration_ms=9.0),
            ),
        )
    )

    assert told == [
        "Answered by llm (llm_in_time) with 3 of 3 items, from bundle v1.",
        "The LLM was predicted to need 12.3 ms of the 50.0 ms that were left, and it answered in time.",
        "No list is stored for the user.",
        (
            "The LLM waited 0.4 ms in its queue and computed 6.0 ms in 1 step (prefill 6.0, decode 0.0);"
            " the way there and back took 2.6 ms."
        ),
        "192 of 201 prompt tokens came from the prefix cache.",
        "It took 12.0 ms of a deadline of 200 ms: in time, 188.0 ms to spare.",
        "The stage that took the most is llm: 9.0 ms, 75% of the whole.",
        "The newest event that it has seen was 5.0 s old.",
        "Request r of caller shop, priority high, through rest at 2027-01-15T08:00:00.000+00:00.",
    ]


def test_a_late_answer_says_by_how_much() -> None:
    """The deadline was missed."""
    assert any("late by 20.0 ms" in sentence for sentence in sentences(explanation(elapsed_ms=220.0)))


def test_a_refusal_is_told_without_what_it_cannot_have() -> None:
    """Two sentences: the refusal, and when it was."""
    refused = Explanation(request_id="r", door="grpc", outcome="overloaded", message="busy", at_unix_ms=0)

    assert sentences(refused) == [
        "Refused with overloaded: busy.",
        "Request r through grpc at 1970-01-01T00:00:00.000+00:00.",
    ]


def test_a_stage_that_holds_others_is_not_the_longest() -> None:
    """`rank` holds the LLM and the student; alone it counts."""
    rank = StageTime(name="rank", offset_ms=0.0, duration_ms=5.0)
    student = StageTime(name="student", offset_ms=0.0, duration_ms=4.0)

    assert longest_stage(explanation(stages=(rank, student))) == student
    assert longest_stage(explanation(stages=(rank,))) == rank


def test_no_tier_and_no_reason_is_without_words() -> None:
    """All reasons that a policy can give are in the table of either moment."""
    from services.gateway.records.describe import _DECIDED, _ENDED

    assert set(Reason) == set(_DECIDED) | set(_ENDED) | {Reason.EVERYTHING_SEEN}
    assert len(Tier) == 4
