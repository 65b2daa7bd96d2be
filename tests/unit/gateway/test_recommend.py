"""Whatever breaks behind the doors, there is an answer, it is in time, and it says why it is what it is."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.contracts.access import ANYONE
from services.contracts.features import UserFeatures
from services.contracts.recommend import Filters, Reason, Recommendation, RecommendRequest, Tier
from services.errors import BundleMismatch, BundleNotFound, DeadlineExceeded, DependencyAway, InvalidRequest, Overloaded
from tests.support.wait import until
from tests.unit.gateway.world import NOW_S, VERSION, World, catalogue_of, make_world, publish, user


async def ask(world: World, user_id: str | None = "long", **fields: Any) -> Recommendation:
    """Ask the plane as a door does."""
    request = RecommendRequest(request_id="r", user_id=user_id, **{"k": 3, **fields})
    return await world.plane.recommend(request, time.monotonic(), "rest", ANYONE)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Overloaded("llm", 1.0), Reason.LLM_OVERLOADED),
        (DependencyAway("llm", 1.0), Reason.LLM_AWAY),
        (DeadlineExceeded("llm"), Reason.LLM_LATE),
        (BundleMismatch("v1", "v2"), Reason.BUNDLE_MISMATCH),
        (BundleNotFound("none yet"), Reason.BUNDLE_MISMATCH),
        (InvalidRequest("prompt", "too long", "send less"), Reason.LLM_FAILED),
        (ZeroDivisionError(), Reason.LLM_FAILED),
    ],
)
async def test_the_student_answers_when_the_llm_does_not(world: World, error: Exception, reason: Reason) -> None:
    """Each way of failing has its own reason."""
    world.llm.error = error

    answer = await ask(world)

    assert (answer.tier, answer.reason) == (Tier.STUDENT, reason)
    assert [item.item_id for item in answer.items] == ["i19", "i18", "i17"]


async def test_the_features_get_half_of_the_time_at_most(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read must leave time to rank by it."""
    boxes: list[float] = []
    read = world.features.read

    async def noting(user_id: str, timeout_s: float) -> UserFeatures:
        """Remember how long the store may take."""
        boxes.append(timeout_s)
        return await read(user_id, timeout_s)

    monkeypatch.setattr(world.features, "read", noting)
    await ask(world, deadline_ms=40)

    assert 0 < boxes[0] <= 0.02


async def test_an_event_from_a_clock_ahead_is_as_old_as_now(world: World) -> None:
    """Doors take events up to a minute ahead; no answer says that it has seen the future."""
    world.features.users["long"] = user("i00", "i01", "i02", newest_ms=int(NOW_S * 1_000) + 30_000)

    answer = await ask(world)

    assert answer.feature_age_ms == 0


async def test_an_llm_that_never_answers_costs_no_deadline(tmp_path: Path) -> None:
    """The wait is cut with the reserve left, the question is cancelled, and the student's list goes out."""
    publish(tmp_path, VERSION, catalogue_of())
    world = make_world(tmp_path, reserve_ms=100.0)
    await world.plane.start()
    world.llm.delay_s = 3_600

    answer = await ask(world, deadline_ms=500)
    await world.plane.stop()

    assert (answer.tier, answer.reason) == (Tier.STUDENT, Reason.LLM_LATE)
    assert world.metric("tailrace_deadline_missed_total", door="rest") == 0


async def test_after_a_late_llm_a_request_that_cannot_wait_is_not_sent(world: World) -> None:
    """The predictor has learnt; a longer deadline still goes."""
    world.llm.delay_s = 0.2
    await ask(world, deadline_ms=100)

    short = await ask(world, deadline_ms=50)
    long = await ask(world, deadline_ms=2_000)

    assert (short.tier, short.reason) == (Tier.STUDENT, Reason.LLM_TOO_SLOW)
    assert long.tier is Tier.LLM


async def test_failures_in_a_row_open_the_breaker(world: World) -> None:
    """The LLM is not asked any more, and the metric says so."""
    world.llm.error = ZeroDivisionError()
    await ask(world)
    await ask(world)

    answer = await ask(world)

    assert (answer.reason, len(world.llm.requests)) == (Reason.LLM_AWAY, 2)
    assert world.metric("tailrace_breaker_open") == 1


async def test_one_id_used_twice_at_once_is_two_questions(world: World) -> None:
    """The engine's ids are ours, so that a caller's habit cannot make it refuse."""
    world.llm.delay_s = 0.01

    answers = await asyncio.gather(ask(world), ask(world))

    assert [answer.request_id for answer in answers] == ["r", "r"]
    assert len({question.request_id for question in world.llm.requests}) == 2


async def test_an_answer_of_another_bundle_is_not_served(world: World) -> None:
    """Even when the replica did not notice."""
    world.llm.version = "v0"

    answer = await ask(world)

    assert (answer.tier, answer.reason) == (Tier.STUDENT, Reason.BUNDLE_MISMATCH)


async def test_what_the_llm_may_not_show_is_dropped_and_topped_up(world: World) -> None:
    """Seen, excluded and unknown items of a careless replica never reach the caller; the student fills the places."""
    world.llm.order = ["i05", "nonsense", "i06", "i07"]
    world.llm.version = "v1"

    answer = await ask(world, k=4, filters=_only("i05", "i07", "i08", "i09"))

    assert [(item.item_id, item.source) for item in answer.items] == [
        ("i05", Tier.LLM),
        ("i07", Tier.LLM),
        ("i09", Tier.STUDENT),
        ("i08", Tier.STUDENT),
    ]
    scores = [item.score for item in answer.items]
    assert scores == sorted(scores, reverse=True)


def _only(*item_ids: str) -> Filters:
    """Allow these alone."""
    return Filters(allowed_item_ids=item_ids)


async def test_a_broken_student_leaves_the_llms_answer_alone(world: World) -> None:
    """It was only the fallback."""
    world.student.error = ZeroDivisionError()

    answer = await ask(world)

    assert (answer.tier, answer.reason) == (Tier.LLM, Reason.LLM_IN_TIME)


async def test_popularity_answers_when_llm_and_student_both_fail(world: World) -> None:
    """The last tier cannot fail."""
    world.student.error = ZeroDivisionError()
    world.llm.error = ZeroDivisionError()

    answer = await ask(world)

    assert (answer.tier, answer.reason) == (Tier.POPULAR, Reason.STUDENT_FAILED)
    assert [item.item_id for item in answer.items] == ["i04", "i05", "i06"]


@pytest.mark.parametrize("how", ["error", "hang"])
async def test_without_features_answers_go_on(world: World, how: str) -> None:
    """Popular for whom nothing is known, the student for whom the request itself says something."""
    if how == "error":
        world.features.error = DependencyAway("features", 1.0)
    else:
        world.features.delay_s = 3_600

    bare = await ask(world)
    helped = await ask(world, recent_item_ids=("i00", "i01", "i02"))

    assert (bare.tier, bare.reason) == (Tier.POPULAR, Reason.FEATURES_AWAY)
    assert (helped.tier, helped.reason) == (Tier.STUDENT, Reason.FEATURES_AWAY)
    assert world.metric("tailrace_deadline_missed_total", door="rest") == 0


async def test_the_impression_goes_out_after_the_answer_and_never_blocks(world: World) -> None:
    """It holds what was shown and from what; with no room it is dropped and counted."""
    answer = await ask(world)
    num_before = len(world.impressions.records)
    await asyncio.sleep(0)
    impression = json.loads(world.impressions.records[0][1])
    world.impressions.is_full = True
    await ask(world)
    await asyncio.sleep(0)

    assert num_before == 0
    assert impression["item_ids"] == [item.item_id for item in answer.items]
    assert (impression["tier"], impression["history_len"]) == ("llm", 4)
    assert world.metric("tailrace_impressions_total", outcome="dropped") == 1


async def test_a_caller_who_leaves_cancels_the_llms_work(world: World) -> None:
    """No question stays in flight for nobody."""
    world.llm.delay_s = 3_600
    asking = asyncio.create_task(ask(world, deadline_ms=5_000))
    await until(lambda: world.llm.requests)

    asking.cancel()
    await asyncio.wait({asking})
    world.llm.delay_s = 0.0

    assert (await ask(world)).tier is Tier.LLM


async def test_a_caller_who_leaves_at_once_frees_the_place(world: World) -> None:
    """Even when the question was taken back before its first step."""
    for _ in range(20):
        asking = asyncio.create_task(ask(world, None, recent_item_ids=("i00", "i01", "i02")))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait({asking})

    assert (await ask(world)).tier is Tier.LLM


async def test_many_callers_at_once_overflow_to_the_student(world: World) -> None:
    """Above the bound nobody queues for the LLM."""
    world.llm.delay_s = 0.02

    answers = await asyncio.gather(*(ask(world, deadline_ms=2_000) for _ in range(12)))

    reasons = [answer.reason for answer in answers]
    assert reasons.count(Reason.LLM_IN_TIME) == 6, "of eight places, two are kept for callers of high priority"
    assert reasons.count(Reason.LLM_OVERLOADED) == 6


@given(
    llm_delay_s=st.sampled_from([0.0, 0.001, 3_600.0]),
    llm_error=st.sampled_from([None, ZeroDivisionError(), Overloaded("llm", 1.0)]),
    features_delay_s=st.sampled_from([0.0, 3_600.0]),
    features_error=st.sampled_from([None, DependencyAway("features", 1.0)]),
    student_error=st.sampled_from([None, ZeroDivisionError()]),
    user_id=st.sampled_from(["listed", "long", "short", "sated", "nobody", "dropouts", None]),
    k=st.sampled_from([1, 3, 2_000]),
    excluded=st.lists(st.sampled_from([f"i{index:02}" for index in range(20)]), max_size=20),
    exclude_seen=st.booleans(),
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_there_is_always_a_whole_answer(tmp_path_factory: pytest.TempPathFactory, **faults: Any) -> None:
    """Under any faults: k items or all that may be shown, none twice, none excluded, scores falling."""
    asyncio.run(_always_whole(tmp_path_factory.mktemp("world"), faults))


async def _always_whole(root: Path, faults: dict[str, Any]) -> None:
    """Ask once under these faults, and check the answer."""
    publish(root / "bundles", VERSION, catalogue_of())
    world = make_world(root / "bundles")
    await world.plane.start()
    world.llm.delay_s, world.llm.error = faults["llm_delay_s"], faults["llm_error"]
    world.features.delay_s, world.features.error = faults["features_delay_s"], faults["features_error"]
    world.student.error = faults["student_error"]
    excluded = set(faults["excluded"])
    answer = await ask(
        world,
        faults["user_id"],
        k=faults["k"],
        deadline_ms=30,
        exclude_item_ids=tuple(excluded),
        exclude_seen=faults["exclude_seen"],
        recent_item_ids=("i00",) if faults["user_id"] is None else (),
    )
    await world.plane.stop()

    shown = [item.item_id for item in answer.items]
    num_unseen = 20 - len(excluded | ({"i00", "i01", "i02", "i03"} if faults["exclude_seen"] else set()))
    assert len(shown) == len(set(shown))
    assert not excluded & set(shown)
    assert len(shown) >= min(faults["k"], max(num_unseen, 0))
    scores = [item.score for item in answer.items]
    assert scores == sorted(scores, reverse=True)
