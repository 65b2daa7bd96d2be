"""Explanations in words: the sentences contain the numbers of the decision, for every tier and reason."""

from dataclasses import asdict
from typing import Any

import pytest

from services.contracts.explanation import ExplanationRecord, LlmPart, StageTime
from services.contracts.recommend import Reason, Tier
from services.gateway.reasons import TIERS
from services.gateway.records.describe import describe, reason_sentence
from services.router.policy import plan
from tests.support.gateway.facts import facts

CHANGES: list[tuple[dict[str, Any], str]] = [
    ({}, "predicted to need 12.3 ms of the 50.0 ms"),
    ({"list_covers": True}, "covers every event"),
    ({"num_history": 2}, "2 known items are too few for the LLM, which is called from 3 on"),
    ({"num_history": 0}, "0 known items"),
    ({"llm_allowed": False}, "surface does not allow a better tier"),
    ({"llm_pays": False}, "For histories of 5 known items the bundle's evaluation shows no gain"),
    ({"num_history": 0, "user_known": False}, "No event of this user is known"),
    ({"num_in_flight": 8}, "All 8 places"),
    ({"predicted_s": 0.2}, "predicted to need 200.0 ms and only 50.0 ms were left"),
    ({"breaker_allows": False}, "Every replica had failed or given no answer"),
    ({"features_unavailable": True}, "feature store did not answer"),
    ({"is_shed": True}, "shed this caller's class"),
    ({"num_allowed": 0}, "seen every item"),
    ({"num_allowed": 0, "num_allowed_if_seen": 0}, "leave no item"),
]


def explanation(**changes: Any) -> ExplanationRecord:
    """Build the explanation of a request answered in 12 ms."""
    fields: dict[str, Any] = {
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
        "facts": asdict(facts()),
    }
    return ExplanationRecord(**{**fields, **changes})


def stage(name: str, offset_ms: float, duration_ms: float) -> StageTime:
    return StageTime(name=name, offset_ms=offset_ms, duration_ms=duration_ms)


@pytest.mark.parametrize(("changes", "words"), CHANGES)
def test_a_planned_reason_is_described_with_its_facts(changes: dict[str, Any], words: str) -> None:
    """The sentence about the policy's decision contains the deciding facts."""
    known = facts(**changes)
    route = plan(known)
    tier, reason = route.tier.value, route.reason.value

    described = explanation(facts=asdict(known), tier=tier, reason=reason, planned_tier=tier, planned_reason=reason)

    assert words in reason_sentence(described)


@pytest.mark.parametrize("reason", Reason)
def test_each_reason_has_a_sentence_and_each_tier_words(reason: Reason) -> None:
    """Every pair of a reason and a planned reason has a sentence, and every tier has words."""
    assert all(reason_sentence(explanation(reason=reason.value, planned_reason=planned.value)) for planned in Reason)
    assert set(TIERS) == set(Tier)


def test_a_complete_explanation() -> None:
    """The sentences cover tier and reason, the LLM's numbers, the deadline, the longest stage and the age."""
    counts: dict[str, Any] = {"num_prompt_tokens": 201, "num_cached_tokens": 192, "num_steps": 1}
    llm = LlmPart(outcome="in_time", queue_ms=0.4, compute_ms=6.0, decode_ms=0.0, **counts)
    stages = tuple(stage(*timing) for timing in [("features", 0.5, 1.0), ("rank", 2.0, 9.1), ("llm", 2.0, 9.0)])

    assert describe(explanation(llm=llm, stages=stages)) == [
        "Answered by llm (llm_in_time) with 3 of 3 items, from bundle v1.",
        "The LLM was predicted to need 12.3 ms of the 50.0 ms that were left, and it answered in time.",
        "No list is stored for the user.",
        (
            "The LLM waited 0.4 ms in its queue and computed 6.0 ms in 1 step (prefill 6.0, decode 0.0);"
            " transport took 2.6 ms."
        ),
        "192 of 201 prompt tokens came from the prefix cache.",
        "It took 12.0 ms of a deadline of 200 ms: in time, 188.0 ms to spare.",
        "The longest stage was llm: 9.0 ms, 75% of the whole.",
        "The newest event that it took into account was 5.0 s old.",
        "Request r of caller shop, priority high, through rest at 2027-01-15T08:00:00.000+00:00.",
    ]
