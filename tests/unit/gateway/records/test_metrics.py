"""The quality metrics of serving: agreement, stored lists, and clicks by the tier of their answer."""

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from services.contracts.events import EventBody
from services.contracts.recommend import Filters, Tier
from services.contracts.tenant import DEFAULT_TENANT
from services.errors import ErrorKind
from services.gateway.call import http
from services.gateway.grpc import answers as rpc_answers
from services.gateway.records.metrics import AnswerMetrics, AnswerSource, Attribution, agreement_of
from services.observability.metrics import GatewayMetrics
from tests.unit.gateway.world import NOW_S, World


def test_the_oldest_answers_are_forgotten() -> None:
    """At most `max_kept` answers are kept, and a repeated request id replaces its previous answer."""
    kept = Attribution(max_kept=2)
    popular, student = AnswerSource("popular", "v1"), AnswerSource("student", "v2")
    for request_id, source in (("a", popular), ("b", popular), ("a", student), ("c", popular)):
        kept.answered(request_id, source)

    assert [kept.source_of(request_id) for request_id in ("a", "b", "c")] == [student, None, popular]


async def test_a_click_counts_for_the_tier_and_bundle_of_its_answer(world: World) -> None:
    """Each event with the request id of an answer is attributed; an event with another or no id is not."""
    shown = await world.recommend(request_id="shown", k=5)

    named = [{"request_id": "shown"}, {"request_id": "x"}, {}, {"request_id": "shown"}]
    await world.plane.record([EventBody("long", "i05", **fields) for fields in named], DEFAULT_TENANT, "rest", "r")

    labels = {"tier": shown.tier.value, "bundle_version": shown.bundle_version}
    assert world.metric("tailrace_answers_total", **labels) == 1
    assert world.metric("tailrace_attributed_events_total", **labels) == 2


@pytest.mark.parametrize(
    ("llm", "student", "share"),
    [([1, 2, 3, 4], [4, 3, 2, 1], 1.0), ([1, 2], [3, 4, 1], 0.0), ([1, 2, 3], [1, 5, 3], 2 / 3), ([], [], None)],
)
def test_agreement_is_the_overlap_of_the_first_k(llm: list[int], student: list[int], share: float | None) -> None:
    """Neither the order within the first k nor the items beyond them matter; an empty ranking has no agreement."""
    assert agreement_of(llm, student, k=len(llm)) == share


@pytest.mark.parametrize(
    ("k", "allowed", "num_ranked", "share"),
    [(1, (), 10, 0.8), (10, (), 10, 0.8), (12, (), 12, 0.8), (2, ("i05", "i06", "i07"), 3, 1.0)],
)
async def test_the_ten_best_items_are_compared_however_many_are_asked_for(
    world: World, k: int, allowed: tuple[str, ...], num_ranked: int, share: float
) -> None:
    """LLM and student rank at least ten items, or all items if a filter leaves fewer, and these are compared."""
    world.student.order = (15, 14, *range(6, 14), 4, 5)

    answer = await world.recommend(k=k, filters=Filters(allowed_item_ids=allowed or None))

    assert (answer.tier, len(answer.items)) == (Tier.LLM, k)
    assert [request.k for request in world.llm.requests] == [num_ranked]
    assert world.metric("tailrace_student_agreement_ratio_count") == 1
    assert world.metric("tailrace_student_agreement_ratio_sum") == share


@pytest.mark.parametrize("user_id", ["listed", "stale"])
async def test_the_age_of_a_stored_list_is_observed_whether_shown_or_not(world: World, user_id: str) -> None:
    """A list made from an older row of the user is observed too."""
    stored = world.features.users[user_id]
    assert stored.precomputed is not None
    made_at_s = int(NOW_S) - 100
    world.features.users[user_id] = replace(stored, precomputed=replace(stored.precomputed, made_at_s=made_at_s))

    await world.recommend(user_id, request_id="shown", k=5)

    assert world.metric("tailrace_precomputed_age_seconds_sum") == 100


def test_series_of_alerts_begin_at_zero() -> None:
    """Each door's error counters start at 0, since Prometheus sees no increase in a counter that starts at 1."""
    registry = CollectorRegistry()
    AnswerMetrics(GatewayMetrics(registry))

    for door in (http.DOOR, rpc_answers.DOOR):
        for kind in ErrorKind:
            labels = {"door": door, "tier": "none", "reason": "none", "code": kind.value}
            assert registry.get_sample_value("tailrace_requests_total", labels) == 0
        assert registry.get_sample_value("tailrace_deadline_missed_total", {"door": door}) == 0
        for tier in Tier:
            assert registry.get_sample_value("tailrace_request_seconds_count", {"door": door, "tier": tier.value}) == 0
