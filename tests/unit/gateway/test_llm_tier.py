"""Asking the LLM: what one question's end teaches the gate for the next."""

import asyncio
from dataclasses import replace

from prometheus_client import CollectorRegistry, Gauge

from services.contracts.rank import EngineLoad, RankRequest, RankResult
from services.gateway.tiers.llm import LlmTier
from services.router.breaker import Breaker
from services.router.gate import LlmGate
from services.router.policy import LlmOutcome
from services.router.predictor import LatencyPredictor
from tests.support.fakes import FakeLlm

NOW_S = 5.0
QUESTION = RankRequest(
    request_id="r", user_id=None, bundle_version="v1", history_item_ids=("i00",), k=2, deadline_unix_s=0.0
)


class BusyLlm(FakeLlm):
    """An LLM that other gateways ask, too."""

    async def rank(self, request: RankRequest, timeout_s: float) -> RankResult:
        """Rank, and tell of seven others."""
        load = EngineLoad(num_running=4, num_waiting=3, kv_cache_usage=0.5)
        return replace(await super().rank(request, timeout_s), load=load)


async def test_what_an_engine_says_of_its_load_counts_for_the_next_question() -> None:
    """One gateway sees its own requests only; the answer tells of the others'."""
    gate = LlmGate(Breaker(2, 60.0), LatencyPredictor(0.0), max_in_flight=8)
    breaker_open = Gauge("breaker", "", registry=CollectorRegistry())
    tier = LlmTier(BusyLlm(["i01", "i02"], "v1"), gate, breaker_open, clock=lambda: NOW_S)

    answer = await tier.ask(QUESTION, 10.0)

    assert answer.outcome is LlmOutcome.IN_TIME
    assert gate.started(NOW_S).load == 7


async def test_a_request_that_is_cancelled_at_the_other_end_is_a_failure() -> None:
    """Only the caller's own cancellation ends the request without an answer."""
    gate = LlmGate(Breaker(2, 60.0), LatencyPredictor(0.0), max_in_flight=8)
    llm = FakeLlm(["i01"], "v1")
    llm.error = asyncio.CancelledError()
    tier = LlmTier(llm, gate, Gauge("breaker", "", registry=CollectorRegistry()), clock=lambda: NOW_S)

    answer = await tier.ask(QUESTION, 10.0)

    assert answer.outcome is LlmOutcome.FAILED
