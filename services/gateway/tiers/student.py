"""The student tier: the distilled model in this process, about a millisecond for a small catalogue.

A large catalogue is scored in the tier's own thread. The model's runtime and most of the selection release the GIL, so
the event loop keeps running.
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import structlog

from models.mixer import STUDENT
from services.contracts.recommend import Reason, Tier
from services.gateway.ranking import ItemRanking
from services.gateway.request.context import RequestContext
from services.gateway.request.masks import Masks
from services.gateway.tiers.tier import TierResult

log = structlog.get_logger()

_MAX_ITEMS_ON_THE_LOOP = 20_000
"""Above this size, scoring on the event loop costs more than the switch to a thread."""


class StudentTier:
    """Ranks with the live bundle's student."""

    tier = Tier.STUDENT

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="student")

    def facts(self, context: RequestContext, budget_s: float) -> Mapping[str, object]:
        """Return whether the surface allows the student, and whether the bundle has one that knows an allowed item."""
        live = context.live
        return {
            "student_allowed": self.tier in context.surface.tiers,
            "is_loading": live.is_partial,
            "is_trained": live.student is not None and _allows_known(context.masks, live.items.num_known),
        }

    def rank(self, context: RequestContext) -> "TierResult | asyncio.Task[TierResult]":
        """Rank the allowed items by the history; in the thread for a large catalogue.

        Fails if the surface excludes the student.
        """
        if self.tier not in context.surface.tiers:
            return TierResult(failure=Reason.NOT_ON_SURFACE)
        if len(context.masks.allowed) <= _MAX_ITEMS_ON_THE_LOOP:
            return _rank(context)
        return asyncio.create_task(self._rank_in_thread(context))

    async def _rank_in_thread(self, context: RequestContext) -> TierResult:
        """Rank within the request's budget; a ranking that waits too long for the thread is cancelled."""
        ranking = asyncio.get_running_loop().run_in_executor(self._thread, _rank, context)
        try:
            return await asyncio.wait_for(ranking, context.deadline.budget_s(self._clock()))
        except TimeoutError:
            log.warning("student_late", request_id=context.request.request_id)
            return TierResult(failure=Reason.STUDENT_FAILED)


def _allows_known(masks: Masks, num_known: int) -> bool:
    """Return whether an item of the bundle is allowed; more allowed items than new items need no look."""
    return masks.num_allowed > len(masks.allowed) - num_known or bool(masks.allowed[:num_known].any())


def _rank(context: RequestContext) -> TierResult:
    with context.stages.measure("student"):
        try:
            allowed = context.masks.allowed[: context.live.items.num_known]  # the student knows no newer items
            assert context.live.student is not None, "the policy asks no student of a bundle without models"
            added = context.live.added(STUDENT, context.history)
            indices, scores = context.live.student.rank(context.history, allowed, context.num_ranked, added)
        except Exception as error:  # noqa: BLE001 - the next tier answers after any failure of the runtime
            log.warning("student_failed", request_id=context.request.request_id, error=repr(error))
            return TierResult(failure=Reason.STUDENT_FAILED)
    if not np.isfinite(scores).all():
        log.warning("student_failed", request_id=context.request.request_id, error="scores that are not finite")
        return TierResult(failure=Reason.STUDENT_FAILED)
    return TierResult(ranking=ItemRanking(Tier.STUDENT, indices, scores.astype(np.float64)))
