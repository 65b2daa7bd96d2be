"""Asking the LLM: one request, one outcome. Every way it can end is a value for the policy.

Owns the gate, and tells it how each question ended. Knows nothing of Ray: the port is below.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import structlog
from prometheus_client import Gauge

from services.contracts.access import Priority
from services.contracts.rank import RankRequest, RankResult
from services.errors import BundleError, DeadlineExceeded, DependencyAway, InvalidRequest, Overloaded
from services.router.gate import LlmGate, LlmView, Sent
from services.router.policy import LlmOutcome

log = structlog.get_logger()


class Llm(Protocol):
    """The LLM replicas."""

    async def rank(self, request: RankRequest, timeout_s: float) -> RankResult:
        """Rank, within `timeout_s` and never later.

        Raises Overloaded, DependencyAway, DeadlineExceeded, BundleError or InvalidRequest.
        """
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

    def view(self, priority: Priority) -> LlmView:
        """Return what is known of the LLM now, to a caller of this priority."""
        return self._gate.view(self._clock(), priority)

    def ask(self, question: RankRequest, timeout_s: float) -> "asyncio.Task[LlmAnswer]":
        """Put a question, and wait for it in the background at most `timeout_s`; cancel the task to take it back.

        It counts as in flight from this very call, so that callers who decide one after another see each other.
        """
        started_s = self._clock()
        sent = self._gate.started(started_s)
        asking = asyncio.create_task(self._wait(question, timeout_s))
        asking.add_done_callback(lambda done: self._ended(done, sent, started_s))
        return asking

    async def _wait(self, question: RankRequest, timeout_s: float) -> LlmAnswer:
        try:
            result = await self._llm.rank(question, timeout_s)
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            return LlmAnswer(LlmOutcome.FAILED)  # it was cancelled at the other end, not by our caller
        except Exception as error:  # noqa: BLE001 - whatever the LLM fails at is an outcome
            return LlmAnswer(_outcome_of(error))
        if result.bundle_version != question.bundle_version:
            return LlmAnswer(LlmOutcome.MISMATCH)
        return LlmAnswer(LlmOutcome.IN_TIME, result) if result.item_ids else LlmAnswer(LlmOutcome.FAILED)

    def _ended(self, asking: "asyncio.Task[LlmAnswer]", sent: Sent, started_s: float) -> None:
        """Tell the gate. A callback, since a task that is cancelled before its first step runs no line of its own."""
        was_taken_back = asking.cancelled() or asking.exception() is not None
        answer = LlmAnswer(LlmOutcome.ABANDONED) if was_taken_back else asking.result()
        now_s = self._clock()
        self._gate.ended(answer.outcome, sent, now_s - started_s, now_s)
        if answer.result is not None:
            self._gate.reported(answer.result.load, now_s)
        self._breaker_open.set(self._gate.is_open(now_s))


def _outcome_of(error: Exception) -> LlmOutcome:
    match error:
        case DeadlineExceeded():
            return LlmOutcome.LATE
        case Overloaded():
            return LlmOutcome.OVERLOADED
        case DependencyAway():
            return LlmOutcome.AWAY
        case BundleError():
            return LlmOutcome.MISMATCH
        case InvalidRequest():
            log.warning("llm_refused", error=str(error))
            return LlmOutcome.REFUSED
        case _:
            log.warning("llm_failed", error=repr(error))
            return LlmOutcome.FAILED
