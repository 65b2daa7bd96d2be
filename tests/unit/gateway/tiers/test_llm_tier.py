"""A request to the LLM has exactly one outcome, which updates the gate."""

import asyncio
import time
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, Gauge

from models.registry.name_record import DEFAULT_NAME
from services.contracts.access import ANYONE
from services.contracts.engine_load import EngineLoad
from services.contracts.rank import RankRequest, RankResult
from services.contracts.recommend import RecommendRequest
from services.errors import DeadlineExceeded
from services.gateway.request.context import FeatureLookup, RequestContext, StageTimer, build_context
from services.gateway.surfaces.surface import NO_SURFACE
from services.gateway.tiers.llm import GatedLlm, LlmResult, LlmTier
from services.router.breaker import Breaker
from services.router.deadline import Deadline
from services.router.gate import LlmGate
from services.router.policy import LlmOutcome, LlmRule
from services.router.predictor import LatencyPredictor
from services.router.replica import RankSize, Replica
from tests.support.gateway.fakes import FakeLlm
from tests.unit.gateway.world import World, user


class BusyLlm(FakeLlm):
    """An LLM that also serves other gateways."""

    async def rank(self, request: RankRequest, timeout_s: float) -> RankResult:
        """Rank, and report seven other requests."""
        load = EngineLoad(num_running=4, num_waiting=3, kv_cache_usage=0.5)
        return replace(await super().rank(request, timeout_s), load=load)


@pytest.fixture
def context(world: World) -> RequestContext:
    """A request of a user with a history, with ten seconds left."""
    now_s = time.monotonic()
    request = RecommendRequest(request_id="r", user_id="u", k=2, exclude_seen=True)
    deadline, lookup = Deadline(now_s, now_s + 10.0, 0.0), FeatureLookup(user("i10", "i11", "i12"))
    return build_context(
        request,
        NO_SURFACE,
        ANYONE,
        deadline,
        world.plane.names.first.current(),
        lookup,
        StageTimer(time.monotonic, now_s),
        world.plane.names.first.current().expressions.compiled([]),
    )


def tier_with(llm: FakeLlm) -> tuple[LlmTier, LlmGate]:
    """Return the tier on this LLM, and its gate."""
    gate = LlmGate(lambda: Replica(Breaker(2, 60.0), LatencyPredictor(0.0)), max_in_flight=8)
    breaker_open = Gauge("breaker", "", ["name"], registry=CollectorRegistry())
    return LlmTier({DEFAULT_NAME: GatedLlm(llm, gate)}, LlmRule(min_history=3), 32, breaker_open), gate


async def outcome_of(tier: LlmTier, context: RequestContext) -> LlmOutcome:
    """Rank, and return the outcome."""
    result = await tier.rank(context)
    assert isinstance(result, LlmResult)
    return result.outcome


async def test_the_load_that_an_engine_reports_counts_for_the_next_request(context: RequestContext) -> None:
    """A gateway sees only its own requests; the engine's response reports all requests."""
    tier, gate = tier_with(BusyLlm(["i01", "i02"], "v1"))

    assert await outcome_of(tier, context) is LlmOutcome.IN_TIME
    size = RankSize(session="s", window_start=0, num_prompt_tokens=1, num_beam_rows=0)
    assert gate.started("", size, time.monotonic()).load == 7


async def test_a_request_that_the_replica_cancels_is_a_failure(context: RequestContext) -> None:
    """Only the caller's own cancellation ends the request without a result."""
    llm = FakeLlm(["i01"], "v1")
    llm.error = asyncio.CancelledError()
    tier, _ = tier_with(llm)

    assert await outcome_of(tier, context) is LlmOutcome.FAILED


async def test_what_crosses_hosts_is_the_time_that_is_left(context: RequestContext, monkeypatch) -> None:
    """The request carries the remaining milliseconds, since the gateway's wall clock may be wrong."""
    monkeypatch.setattr(time, "time", lambda: 0.0)
    llm = FakeLlm(["i01", "i02"], "v1")
    tier, _ = tier_with(llm)

    await tier.rank(context)

    assert 5_000 < llm.requests[0].budget_ms <= 10_000


async def test_a_ranking_names_its_replicas_and_leaves_one_that_gives_no_answer(context: RequestContext) -> None:
    """Requests of a user prefer the same replica; after a late answer the other replica is first."""
    llm = FakeLlm(["i01", "i02"], "v1")
    llm.names = ("a", "b")
    tier, _ = tier_with(llm)
    await tier.rank(context)
    llm.error = DeadlineExceeded("llm")
    llm.delay_s = 0.03
    await tier.rank(context)
    await tier.rank(context)

    home, again, other = (request.replicas[0] for request in llm.requests)
    assert (home, {home, other}) == (again, {"a", "b"})


async def test_no_caller_waits_for_the_trial_of_a_silent_replica(context: RequestContext) -> None:
    """A silent replica is tested with a copy of a request that another replica answers; a success restores it."""
    llm = FakeLlm(["i01", "i02"], "v1")
    llm.names = ("a", "b")
    tier, _ = tier_with(llm)
    await tier.rank(context)
    llm.error, llm.delay_s = DeadlineExceeded("llm"), 0.03
    await tier.rank(context)
    llm.error = None
    await asyncio.sleep(0.06)

    result = await tier.rank(context)
    await asyncio.sleep(0.06)

    (home,), copy, request = ({sent.replicas[0] for sent in llm.requests[:2]}, *llm.requests[2:])
    assert isinstance(result, LlmResult)
    assert result.outcome is LlmOutcome.IN_TIME
    assert (copy.replicas, home in request.replicas) == ((home,), False)
    assert tier.view(context, 1.0).replicas[0] == home
