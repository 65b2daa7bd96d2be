"""The student tier: the distilled model in this process, in about a millisecond."""

import structlog

from services.contracts.recommend import Reason, Tier
from services.gateway.request.candidates import ItemRanking
from services.gateway.request.context import RequestContext
from services.gateway.tiers.tier import TierResult

log = structlog.get_logger()


class StudentTier:
    """Ranks with the live bundle's student."""

    tier = Tier.STUDENT

    def rank(self, context: RequestContext) -> TierResult:
        """Rank the allowed items by the history."""
        with context.stages.measure("student"):
            try:
                indices, scores = context.live.student.rank(context.history, context.masks.allowed, context.num_wanted)
            except Exception as error:  # noqa: BLE001 - whatever its runtime fails at, the next tier answers
                log.warning("student_failed", request_id=context.request.request_id, error=repr(error))
                return TierResult(failure=Reason.STUDENT_FAILED)
        return TierResult(ranking=ItemRanking(Tier.STUDENT, indices.tolist(), scores.tolist()))
