"""Shadow rankings: computed after the answer within spare capacity, compared and discarded."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.registry.canary import CanaryStage
from models.registry.store import BundleStore
from services.contracts.access import Priority
from services.contracts.recommend import Filters, PopularIn, Reason, SimilarTo, Tier
from services.gateway.overload.admission import AdmissionLimits
from services.gateway.records.rank_overlap import rank_biased_overlap
from tests.support.wait import until
from tests.unit.gateway.world import CONFIG, VERSION, World, add_version, catalogue_of, started_world

SAMPLES = "tailrace_shadow_samples_total"
TEACHER_AGREEMENT = "tailrace_teacher_agreement_ratio"
LISTS = st.lists(st.sampled_from([f"i{number}" for number in range(12)]), unique=True, max_size=10)


def overlap_by_definition(first: Sequence[str], other: Sequence[str], p: float) -> float:
    """Sum the agreement at each depth by intersecting sets; beyond a list's end its agreement stays constant."""
    short, long = sorted((first, other), key=len)
    total = 0.0
    for depth in range(1, 1_200):
        known = set(short[:depth]) & set(long[:depth])
        at_end = len(set(short) & set(long[: len(short)])) / len(short)
        past_short = at_end * max(0, min(depth, len(long)) - len(short))
        total += (1 - p) * p ** (depth - 1) * (len(known) + past_short) / min(depth, len(long))
    return total


@given(first=LISTS, other=LISTS, p=st.sampled_from([0.5, 0.9, 0.98]))
def test_the_overlap_equals_its_definition(first: list[str], other: list[str], p: float) -> None:
    """The overlap equals the sum over all depths, in either order; an empty list has none."""
    overlap = rank_biased_overlap(first, other, p)

    assert overlap == rank_biased_overlap(other, first, p)
    if first and other:
        assert overlap == pytest.approx(overlap_by_definition(first, other, p), abs=1e-9)
    else:
        assert overlap is None


@pytest.fixture
async def taught(tmp_path: Path) -> AsyncIterator[World]:
    async with started_world(tmp_path, teacher_share=1.0) as made:
        yield made


CANDIDATE = "v2"
CANDIDATE_AGREEMENT = "tailrace_candidate_agreement_ratio"


@pytest.fixture
async def releasing(tmp_path: Path) -> AsyncIterator[World]:
    """A world that samples every answer for a loaded candidate of fifteen items of one category, without users yet."""
    async with started_world(tmp_path, shadow_share=1.0) as made:
        add_version(tmp_path / "bundles", CANDIDATE, replace(catalogue_of(15), categories=(("even",),) * 15))
        BundleStore(tmp_path / "bundles").release(CANDIDATE, [CanaryStage(0.5, 60.0)], since_ms=253_402_300_799_999)
        await made.plane.names.of(None).refresh()
        yield made


async def outcomes(world: World, num_samples: int, by: str = "teacher") -> dict[str, float]:
    """Wait until this many samples have an outcome; return the counts by outcome."""

    def by_outcome() -> dict[str, float]:
        metrics = [metric for metric in world.registry.collect() if metric.name == SAMPLES.removesuffix("_total")]
        samples = [sample for metric in metrics for sample in metric.samples if sample.name == SAMPLES]
        return {sample.labels["outcome"]: sample.value for sample in samples if sample.labels["by"] == by}

    await until(lambda: sum(by_outcome().values()) >= num_samples)
    return by_outcome()


@pytest.mark.parametrize(("user_id", "tier"), [("short", Tier.STUDENT), ("listed", Tier.PRECOMPUTED)])
async def test_the_teacher_ranks_what_another_tier_answered(taught: World, user_id: str, tier: Tier) -> None:
    """The LLM ranks after the answer with low priority, for any history length; only the overlap is observed."""
    answer = await taught.recommend(user_id, k=5)
    num_before = len(taught.llm.requests)

    assert await outcomes(taught, 1) == {"compared": 1}
    labels = {"name": "default", "tier": tier.value, "version": VERSION}
    (request,) = taught.llm.requests
    by_llm = [item for item in taught.llm.order if item not in request.excluded_item_ids][:5]
    shown = [item.item_id for item in answer.items]
    assert (answer.tier, num_before, request.priority) == (tier, 0, Priority.LOW)
    assert request.budget_ms > CONFIG.deadlines.default_ms
    assert taught.metric(f"{TEACHER_AGREEMENT}_count", **labels) == 1
    assert taught.metric(f"{TEACHER_AGREEMENT}_sum", **labels) == rank_biased_overlap(shown, by_llm)
    assert len(taught.impressions.records) == 1
    assert taught.metric("tailrace_answers_total", tier=tier.value, bundle_version=VERSION) == 1


async def test_a_failure_of_the_llm_reaches_nobody(taught: World) -> None:
    """The LLM gets the answer's filters and exclusions; its failure is counted and does not affect the answer."""
    taught.llm.error = RuntimeError("no such kernel")

    answer = await taught.recommend("short", filters=Filters(categories=("odd",)), exclude_item_ids=("i05",))

    assert answer.tier is Tier.STUDENT
    assert await outcomes(taught, 1) == {"llm_failed": 1}
    (request,) = taught.llm.requests
    assert request.filters.categories == ("odd",)
    assert {"i00", "i05"} <= set(request.excluded_item_ids)


async def test_what_no_model_ranks_is_not_drawn(taught: World) -> None:
    """Answers of the LLM, similar and popular items, and answers without features or from memory are not sampled."""
    await taught.recommend("long")
    await taught.recommend("short", subject=SimilarTo(("i03",)))
    await taught.recommend("short", subject=PopularIn())
    taught.features.error = RuntimeError()
    await taught.recommend("short")
    taught.features.error = None
    taught.strain(2)
    assert (await taught.recommend("short")).reason is Reason.SHED
    num_asked = len(taught.llm.requests)

    assert num_asked == 1
    assert await outcomes(taught, 0) == {}


async def test_a_user_without_a_history_is_skipped(taught: World) -> None:
    """The LLM is not called without a history, and the sample is counted with the policy's reason."""
    await taught.recommend("nobody")

    assert await outcomes(taught, 1) == {"unknown_user": 1}
    assert taught.llm.requests == []


async def test_the_candidate_ranks_what_the_live_version_answered(releasing: World) -> None:
    """The overlap is observed by tier and candidate; answer, impression and counts are the live version's."""
    answer = await releasing.recommend("short", k=5)

    assert await outcomes(releasing, 1, "candidate") == {"compared": 1}

    labels = {"name": "default", "tier": "student", "version": CANDIDATE}
    by_candidate = [f"i{index:02}" for index in range(14, 9, -1)]
    shown = [item.item_id for item in answer.items]
    assert (answer.bundle_version, shown[0]) == (VERSION, "i19")
    assert releasing.metric(f"{CANDIDATE_AGREEMENT}_sum", **labels) == rank_biased_overlap(shown, by_candidate)
    assert len(releasing.impressions.records) == 1
    assert releasing.metric("tailrace_answers_total", tier="student", bundle_version=CANDIDATE) == 0


async def test_a_candidate_has_no_list_of_the_live_version(releasing: World) -> None:
    """After a stored list the candidate's models rank; an LLM without the candidate gives no comparison."""
    answer = await releasing.recommend("listed")

    assert answer.tier is Tier.PRECOMPUTED
    assert await outcomes(releasing, 1, "candidate") == {"bundle_mismatch": 1}


async def test_a_request_that_the_candidate_refuses_has_its_answer(releasing: World) -> None:
    """The candidate has no item of the category: the failure is counted and does not affect the answer."""
    answer = await releasing.recommend("short", filters=Filters(categories=("odd",)))

    assert len(answer.items) == 3
    assert await outcomes(releasing, 1, "candidate") == {"failed": 1}


async def test_without_a_release_there_is_no_candidate(releasing: World, tmp_path: Path) -> None:
    """No request is sampled after the release has ended."""
    BundleStore(tmp_path / "bundles").end_canary(CANDIDATE)
    await releasing.plane.names.of(None).refresh()

    await releasing.recommend("short")
    await asyncio.sleep(0.05)

    assert await outcomes(releasing, 0, "candidate") == {}


async def test_nothing_is_drawn_by_default(world: World) -> None:
    """By default no answer is ranked again."""
    await world.recommend("short")
    await asyncio.sleep(0.05)

    assert world.llm.requests == []


async def test_one_sample_at_a_time(taught: World) -> None:
    """Samples drawn while another is ranked are counted and discarded."""
    taught.llm.gate = asyncio.Event()
    for _ in range(3):
        await taught.recommend("short")
    taught.llm.gate.set()

    assert await outcomes(taught, 3) == {"busy": 2, "compared": 1}
    assert len(taught.llm.requests) == 1


async def test_no_room_at_the_llm_is_no_room_for_samples(taught: World) -> None:
    """A sample is skipped while half of the LLM's slots are in use."""
    taught.llm.gate = asyncio.Event()
    num_half = CONFIG.max_llm_in_flight // 2
    waiting = [asyncio.create_task(taught.recommend("long", request_id=f"r{n}")) for n in range(num_half)]
    await until(lambda: len(taught.llm.requests) == num_half)

    await taught.recommend("short")

    assert await outcomes(taught, 1) == {"llm_overloaded": 1}
    taught.llm.gate.set()
    assert {(await task).tier for task in waiting} == {Tier.LLM}


async def test_under_load_nothing_is_ranked_again(tmp_path: Path) -> None:
    """Under strain, no sample is ranked, and all served requests meet their deadlines."""
    admission = AdmissionLimits(max_in_flight=256, max_busy=1e9)
    async with started_world(tmp_path, teacher_share=1.0, admission=admission) as world:
        while world.plane.load.admission.strain < 1:
            time.sleep(0.06)  # noqa: ASYNC251 - the test must block the event loop
            await asyncio.sleep(0)
        for number in range(50):
            await world.recommend("short", Priority.HIGH, request_id=f"r{number}", deadline_ms=5_000)
        strain = world.plane.load.admission.strain

        counts = await outcomes(world, 50)

        assert strain > 0
        assert set(counts) <= {"no_capacity", "busy"}
        assert world.llm.requests == []
        assert world.metric("tailrace_deadline_missed_total", door="rest") == 0


async def test_a_sample_under_way_is_cancelled_at_the_end(tmp_path: Path) -> None:
    """Stopping cancels a running sample."""
    async with started_world(tmp_path, teacher_share=1.0) as world:
        world.llm.delay_s = 3_600.0
        await world.recommend("short")
        await until(lambda: world.llm.requests)
    await asyncio.sleep(0)

    assert asyncio.all_tasks() == {asyncio.current_task()}
