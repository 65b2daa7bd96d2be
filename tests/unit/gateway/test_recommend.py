"""Every request gets an answer, in time and with its reason, under any fault behind the doors."""

import asyncio
import gc
import json
import math
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.contracts.access import ANYONE
from services.contracts.features import UserFeatures
from services.contracts.message import convert
from services.contracts.recommend import Filters, Reason, RecommendRequest, Tier
from services.contracts.rules import Rules
from services.errors import (
    BundleMismatch,
    BundleNotFound,
    DeadlineExceeded,
    DependencyUnavailable,
    InvalidRequest,
    Overloaded,
)
from services.items.expression import FEW_TESTS
from services.router.deadline import Arrival
from tests.support.wait import until
from tests.unit.gateway.world import CONFIG, NOW_S, World, started_world, user


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"error": Overloaded("llm", 1.0)}, Reason.LLM_OVERLOADED),
        ({"error": DependencyUnavailable("llm", 1.0)}, Reason.LLM_UNAVAILABLE),
        ({"error": DeadlineExceeded("llm")}, Reason.LLM_LATE),
        ({"error": BundleMismatch("v1", "v2")}, Reason.BUNDLE_MISMATCH),
        ({"error": BundleNotFound("none yet")}, Reason.BUNDLE_MISMATCH),
        ({"version": "v0"}, Reason.BUNDLE_MISMATCH),
        ({"error": InvalidRequest("prompt", "too long", "send less")}, Reason.LLM_FAILED),
        ({"error": ZeroDivisionError()}, Reason.LLM_FAILED),
    ],
)
async def test_the_student_answers_when_the_llm_does_not(world: World, fault: dict[str, Any], reason: Reason) -> None:
    """Each failure of the LLM has its own reason, including an undetected answer of another bundle."""
    vars(world.llm).update(fault)

    answer = await world.recommend()

    assert (answer.tier, answer.reason) == (Tier.STUDENT, reason)
    assert [item.item_id for item in answer.items] == ["i19", "i18", "i17"]


@pytest.mark.parametrize("left_s", [pytest.param(-0.8, id="passed"), pytest.param(0.005, id="passes in this turn")])
async def test_an_expired_request_is_refused_before_it_waits_for_its_turn(world: World, left_s: float) -> None:
    """While others wait to begin, in turns of ten milliseconds, it is refused without a turn of the loop."""
    others = [asyncio.create_task(world.recommend()) for _ in range(40)]
    await asyncio.sleep(0)
    time.sleep(0.1)  # noqa: ASYNC251 - a long turn, a tenth of which enters the mean
    await asyncio.sleep(0)
    request = RecommendRequest(user_id="long", request_id="late", k=3, deadline_ms=200)
    waited_s = 0.2 - left_s
    call: Any = world.plane.recommend(request, Arrival(time.monotonic() - waited_s, waited_s), "rest", ANYONE)

    with pytest.raises(Overloaded):
        call.send(None)
    assert len(await asyncio.gather(*others)) == 40


async def test_scores_that_are_no_numbers_are_a_failed_tier(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Non-finite scores of a stored list, the LLM or the student make the next tier answer."""
    nans = (math.nan, math.inf, -math.inf)
    rank = world.llm.rank

    async def ranked(request: Any, timeout_s: float) -> Any:
        """Rank with these scores."""
        return replace(await rank(request, timeout_s), scores=(0.0, *nans)[: len(request.history_item_ids)])

    listed = world.features.users["listed"]
    assert listed.precomputed is not None
    spoiled = replace(listed.precomputed, scores=(*listed.precomputed.scores[:-1], math.nan))
    world.features.users["listed"] = replace(listed, precomputed=spoiled)
    stored = await world.recommend("listed")
    monkeypatch.setattr(world.llm, "rank", ranked)
    by_llm = await world.recommend()
    monkeypatch.setattr(world.student, "rank", lambda *_: (np.arange(3), np.array(nans)))
    by_student = await world.recommend()

    assert stored.tier is not Tier.PRECOMPUTED
    assert (by_llm.tier, by_llm.reason) == (Tier.STUDENT, Reason.LLM_FAILED)
    assert (by_student.tier, by_student.reason) == (Tier.POPULAR, Reason.STUDENT_FAILED)
    assert all(math.isfinite(item.score) for answer in (stored, by_llm, by_student) for item in answer.items)


async def test_long_expressions_are_compiled_beside_the_event_loop(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long expressions compile in a thread; unfinished work makes the request late, but serves the next request."""
    threads, may_go_on = list[str](), threading.Event()
    expressions = world.plane.names.first.current().expressions
    compute = type(expressions)._compute

    def slow(self: Any, columns: Any, clause: Any, rows: Any) -> Any:
        threads.append(threading.current_thread().name)
        assert may_go_on.wait(10)
        return compute(self, columns, clause, rows)

    monkeypatch.setattr(type(expressions), "_compute", slow)
    long = {"must": [{"key": "popularity", "range": {"gte": -number}} for number in range(FEW_TESTS + 1)]}
    filters = convert(Filters, long)
    rules = convert(Rules, {"boosts": [{"where": {"key": "categories", "eq": "odd"}, "factor": 9.0}]})
    with pytest.raises(DeadlineExceeded):
        await world.recommend(filters=filters, deadline_ms=40)
    waiting = asyncio.create_task(world.recommend(filters=filters, rules=rules, deadline_ms=5_000))
    other = await world.recommend()
    may_go_on.set()
    answer = await waiting

    assert other.tier == Tier.LLM
    assert [item.item_id for item in answer.items]
    assert "filters" in answer.stages_ms
    assert {name.partition("_")[0] for name in threads} == {"filters"}


async def test_the_feature_read_gets_half_of_the_time_at_most(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The read leaves half of the time for the ranking."""
    timeouts_s: list[float] = []

    async def read(user_id: str, bundle_version: str, timeout_s: float) -> UserFeatures:
        timeouts_s.append(timeout_s)
        return UserFeatures()

    monkeypatch.setattr(world.features, "read", read)
    await world.recommend(deadline_ms=40)

    assert 0 < timeouts_s[0] <= 0.02


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("exclude_seen", [None, True, False])
async def test_a_bundle_s_data_decides_whether_seen_items_are_shown(
    tmp_path: Path, repeats: bool, exclude_seen: bool | None
) -> None:
    """By default, bundles trained on repeats show seen items, also in stored lists; `exclude_seen` overrides this."""
    seen = {"i05", "i06"}
    async with started_world(tmp_path, about={"repeats": repeats}) as world:
        world.features.users["listed"] = user(*seen, "i00", listed=("i05", "i06", "i07", "i08", "i09"))
        world.features.users["long"] = user(*seen, "i19", "i18")
        whole = [await world.recommend(name, k=17, exclude_seen=exclude_seen) for name in ("listed", "long")]
        short = await world.recommend("listed", k=2, exclude_seen=exclude_seen)

    is_shown = repeats if exclude_seen is None else not exclude_seen
    assert [seen <= {item.item_id for item in answer.items} for answer in whole] == [is_shown] * 2
    assert short.tier is (Tier.LLM if exclude_seen is False and not repeats else Tier.PRECOMPUTED)


async def test_the_llm_answers_where_the_bundle_shows_its_gain(tmp_path: Path) -> None:
    """If the gain starts at histories of 4 items, a user with 3 items gets the student and the reason."""
    async with started_world(tmp_path, about={"llm_pays": [[4, None]]}) as world:
        world.features.users["three"] = user("i00", "i01", "i02")
        three, four = [await world.recommend(name) for name in ("three", "long")]

    assert (three.tier, three.reason) == (Tier.STUDENT, Reason.STUDENT_SUFFICES)
    assert (four.tier, four.reason) == (Tier.LLM, Reason.LLM_IN_TIME)


@pytest.mark.parametrize("error", [None, ZeroDivisionError()])
@pytest.mark.parametrize("exclude_seen", [True, False])
async def test_a_disliked_item_is_never_shown(world: World, error: Exception | None, exclude_seen: bool) -> None:
    """Disliked items are never shown, in any tier and regardless of `exclude_seen`, and the replica excludes them."""
    disliked = ("i19", "i18", "i10", "i05", "i00")
    for name in ("listed", "long", "short"):
        world.features.users[name] = replace(world.features.users[name], disliked_item_ids=disliked)
    world.llm.error = world.student.error = error

    answers = [await world.recommend(name, k=12, exclude_seen=exclude_seen) for name in ("listed", "long", "short")]

    tiers = {Tier.POPULAR} if error else {Tier.PRECOMPUTED, Tier.LLM, Tier.STUDENT}
    assert {answer.tier for answer in answers} <= tiers
    assert all(len(answer.items) == 12 for answer in answers)
    assert not {item.item_id for answer in answers for item in answer.items} & {*disliked}
    assert all({*disliked} <= {*request.excluded_item_ids} for request in world.llm.requests)


async def test_an_llm_that_never_answers_costs_no_deadline(tmp_path: Path) -> None:
    """The wait ends before the reserve, and the student answers in time."""
    async with started_world(tmp_path, deadlines=replace(CONFIG.deadlines, reserve_ms=500.0)) as world:
        world.llm.delay_s = 3_600
        answer = await world.recommend(deadline_ms=2_000)

    assert (answer.tier, answer.reason) == (Tier.STUDENT, Reason.LLM_LATE)
    assert world.metric("tailrace_deadline_missed_total", door="rest") == 0


async def test_a_feature_age_is_never_negative(world: World) -> None:
    """Events may be up to a minute ahead of the clock; their age is reported as 0."""
    world.features.users["long"] = user("i00", "i01", "i02", newest_ms=int(NOW_S * 1_000) + 30_000)

    assert (await world.recommend()).feature_age_ms == 0


async def test_failures_in_a_row_open_the_breaker(world: World) -> None:
    """An open breaker stops calls to the LLM and sets the metric."""
    world.llm.error = ZeroDivisionError()
    await world.recommend()
    await world.recommend()

    answer = await world.recommend()

    assert (answer.reason, len(world.llm.requests)) == (Reason.LLM_UNAVAILABLE, 2)
    assert world.metric("tailrace_breaker_open", name="default") == 1


async def test_one_request_id_used_twice_at_once_is_two_llm_requests(world: World) -> None:
    """The engine gets our own request ids, so a repeated id of the caller causes no rejection."""
    world.llm.delay_s = 0.01

    answers = await asyncio.gather(world.recommend(), world.recommend())

    assert [answer.request_id for answer in answers] == ["r", "r"]
    assert len({request.request_id for request in world.llm.requests}) == 2


async def test_forbidden_items_of_the_llm_are_replaced(world: World) -> None:
    """Seen, excluded and unknown items never reach the caller; the student fills their positions, with lower scores."""
    world.llm.order = ["i05", "nonsense", "i06", "i07"]

    answer = await world.recommend(k=4, filters=Filters(allowed_item_ids=("i05", "i07", "i08", "i09")))

    llm, student = Tier.LLM, Tier.STUDENT
    shown = [(item.item_id, item.source) for item in answer.items]
    assert shown == [("i05", llm), ("i07", llm), ("i09", student), ("i08", student)]
    assert [item.score for item in answer.items] == sorted((item.score for item in answer.items), reverse=True)


@pytest.mark.parametrize(("error", "delay_s"), [(DependencyUnavailable("features", 1.0), 0.0), (None, 3_600)])
async def test_without_features_there_are_answers(world: World, error: Exception | None, delay_s: float) -> None:
    """Popularity answers a request without history, the student a request with recent items."""
    world.features.error, world.features.delay_s = error, delay_s

    bare = await world.recommend(deadline_ms=1_000)
    helped = await world.recommend(recent_item_ids=("i00", "i01", "i02"), deadline_ms=1_000)

    assert (bare.tier, bare.reason) == (Tier.POPULAR, Reason.FEATURES_UNAVAILABLE)
    assert (helped.tier, helped.reason) == (Tier.STUDENT, Reason.FEATURES_UNAVAILABLE)
    assert world.metric("tailrace_deadline_missed_total", door="rest") == 0


async def test_the_impression_says_what_was_shown_and_never_blocks(world: World) -> None:
    """The impression has the items, the tier and the history length; if the log is full, it is dropped and counted."""
    answer = await world.recommend()
    impression = json.loads(world.impressions.records[0][1])
    world.impressions.is_full = True
    await world.recommend()

    assert impression["item_ids"] == [item.item_id for item in answer.items]
    assert (impression["tier"], impression["history_len"]) == ("llm", 4)
    assert impression["scores"] == [item.score for item in answer.items]
    assert impression["deadline_ms"] == answer.deadline_ms
    assert world.metric("tailrace_impressions_total", outcome="dropped") == 1


@pytest.mark.parametrize("num_begun", [0, 1])
async def test_a_disconnect_frees_the_llms_place(world: World, num_begun: int) -> None:
    """A disconnect during the ranking, or before the request's first step, releases the LLM's slot."""
    for _ in range(20):
        world.llm.delay_s = 3_600
        call = asyncio.create_task(world.recommend(None, recent_item_ids=("i00", "i01", "i02"), deadline_ms=5_000))
        await asyncio.sleep(0)
        await until(lambda: len(world.llm.requests) >= num_begun)
        call.cancel()
        await asyncio.wait({call})
        world.llm.requests.clear()
    world.llm.delay_s = 0.0

    assert (await world.recommend()).tier is Tier.LLM


async def test_many_callers_at_once_overflow_to_the_student(world: World) -> None:
    """Requests above the bound do not wait for the LLM."""
    world.llm.gate = asyncio.Event()
    calls = [asyncio.create_task(world.recommend()) for _ in range(12)]
    await until(lambda: len(world.llm.requests) + sum(call.done() for call in calls) == 12)
    world.llm.gate.set()
    answers = await asyncio.gather(*calls)

    reasons = [answer.reason for answer in answers]
    assert reasons.count(Reason.LLM_IN_TIME) == 6, "two of the eight places are kept for high priority"
    assert reasons.count(Reason.LLM_OVERLOADED) == 6


@given(
    llm_delay_s=st.sampled_from([0.0, 0.001, 3_600.0]),
    llm_error=st.sampled_from([None, ZeroDivisionError(), Overloaded("llm", 1.0)]),
    features_delay_s=st.sampled_from([0.0, 3_600.0]),
    features_error=st.sampled_from([None, DependencyUnavailable("features", 1.0)]),
    student_error=st.sampled_from([None, ZeroDivisionError()]),
    user_id=st.sampled_from(["listed", "long", "short", "sated", "nobody", "dropouts", None]),
    k=st.sampled_from([1, 3, 2_000]),
    excluded=st.sets(st.sampled_from([f"i{index:02}" for index in range(20)])),
    exclude_seen=st.booleans(),
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_there_is_always_a_complete_answer(
    tmp_path_factory: pytest.TempPathFactory,
    user_id: str | None,
    k: int,
    excluded: set[str],
    exclude_seen: bool,
    **faults: Any,
) -> None:
    """Under any faults the answer has k or all allowed items, distinct, not excluded, by descending score."""
    async with started_world(tmp_path_factory.mktemp("world")) as world:
        world.llm.delay_s, world.llm.error = faults["llm_delay_s"], faults["llm_error"]
        world.features.delay_s, world.features.error = faults["features_delay_s"], faults["features_error"]
        world.student.error = faults["student_error"]
        answer = await world.recommend(
            user_id,
            k=k,
            deadline_ms=30,
            exclude_item_ids=tuple(excluded),
            exclude_seen=exclude_seen,
            recent_item_ids=("i00",) if user_id is None else (),
        )

    shown, scores = [item.item_id for item in answer.items], [item.score for item in answer.items]
    num_unseen = 20 - len(excluded | ({"i00", "i01", "i02", "i03"} if exclude_seen else set()))
    assert len(shown) == len(set(shown))
    assert not excluded & set(shown)
    assert len(shown) >= min(k, max(num_unseen, 0))
    assert scores == sorted(scores, reverse=True)


USERS = ("listed", "long", "short", "nobody")
NUM_REQUESTS = 100
UNAVAILABLE = DependencyUnavailable("it", 1.0)


async def num_objects_after(world: World, kind: str) -> int:
    """Return the number of objects tracked by the collector after NUM_REQUESTS requests, without the fakes' records."""
    for number in range(NUM_REQUESTS):
        await world.recommend(USERS[number % len(USERS)], request_id=f"{kind} {number}")
    await world.plane.explanations.flush()
    world.llm.requests.clear()
    world.events.records.clear()
    world.impressions.records.clear()
    world.shelf.records.clear()
    UNAVAILABLE.__traceback__ = None  # grows each time a fake raises it
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.parametrize("fault", ["none", "store", "llm", "student", "log"])
async def test_an_answer_leaves_no_object_behind(world: World, fault: str) -> None:
    """A gateway keeps only ids of recent answers and shared sources, but no object per answer, under any fault."""
    world.features.error = UNAVAILABLE if fault == "store" else None
    world.llm.error = UNAVAILABLE if fault == "llm" else None
    world.student.error = UNAVAILABLE if fault == "student" else None
    world.impressions.is_full = fault == "log"
    before = await num_objects_after(world, "first")

    assert await num_objects_after(world, "second") - before < NUM_REQUESTS // 4
