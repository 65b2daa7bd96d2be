"""Asking the LLM: one question, one time box, one outcome. Every way it can end is a value for the policy.

Owns the gate, and tells it how each question ended. Knows nothing of Ray: the port is below.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import structlog
from prometheus_client import Gauge

from services.contracts.rank import RankRequest, RankResult
from services.errors import BundleMismatch, DeadlineExceeded, DependencyAway, Overloaded
from services.gateway.time_box import Settled, time_box
from services.router.gate import LlmGate, LlmView
from services.router.policy import LlmOutcome

log = structlog.get_logger()


class Llm(Protocol):
    """The LLM replicas."""

    async def rank(self, request: RankRequest, timeout_s: float) -> RankResult:
        """Spell the next items. Raises Overloaded, DependencyAway, DeadlineExceeded or BundleMismatch."""
        ...


@dataclass(frozen=True, slots=True)
class LlmAnswer:
    """How asking ended; a result is there only when it came in time."""

    outcome: LlmOutcome
    result: RankResult | None = None


class LlmTier:
    """The LLM behind its gate."""

    def __init__(
        self, llm: Llm, gate: LlmGate, breaker_open: Gauge, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._llm = llm
        self._gate = gate
        self._breaker_open = breaker_open
        self._clock = clock

    def view(self) -> LlmView:
        """Give what is known of the LLM now."""
        return self._gate.view(self._clock())

    async def ask(self, question: RankRequest, timeout_s: float) -> LlmAnswer:
        """Ask, and wait at most `timeout_s`. Never raises, its own cancellation apart."""
        started_s = self._clock()
        load = self._gate.started(started_s)
        answer = LlmAnswer(LlmOutcome.ABANDONED)
        try:
            answer = _answer(question, await time_box(self._llm.rank(question, timeout_s), timeout_s))
        finally:
            now_s = self._clock()
            self._gate.ended(answer.outcome, load, now_s - started_s, now_s)
            self._breaker_open.set(self._gate.is_open(now_s))
        if answer.result is not None:
            self._gate.reported(answer.result.load, self._clock())
        return answer


def _answer(question: RankRequest, settled: Settled[RankResult]) -> LlmAnswer:
    if settled.value is None:
        return LlmAnswer(_outcome_of(settled.error))
    if settled.value.bundle_version != question.bundle_version:
        return LlmAnswer(LlmOutcome.MISMATCH)
    if not settled.value.item_ids:
        return LlmAnswer(LlmOutcome.FAILED)
    return LlmAnswer(LlmOutcome.IN_TIME, settled.value)


def _outcome_of(error: BaseException | None) -> LlmOutcome:
    match error:
        case None | DeadlineExceeded():
            return LlmOutcome.LATE
        case Overloaded():
            return LlmOutcome.OVERLOADED
        case DependencyAway():
            return LlmOutcome.AWAY
        case BundleMismatch():
            return LlmOutcome.MISMATCH
        case _:
            log.warning("llm_failed", error=repr(error))
            return LlmOutcome.FAILED
