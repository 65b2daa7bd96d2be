"""The ports of a tier, and the result of its ranking."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from services.contracts.recommend import Reason, Tier
from services.gateway.ranking import ItemRanking
from services.gateway.request.context import RequestContext

COMPLETED_BY: Mapping[Tier, Tier] = {Tier.PRECOMPUTED: Tier.STUDENT, Tier.LLM: Tier.STUDENT}
"""The tier that ranks the items which a list or a beam does not name, for a wish that may fit any of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierResult:
    """A ranking, or the reason why the tier has none. The ranking may be empty or shorter than requested."""

    ranking: ItemRanking | None = None
    failure: Reason | None = None


class RankingTier(Protocol):
    """A way to rank. Only `services.router.policy` selects the tier of a request, from facts."""

    @property
    def tier(self) -> Tier:
        """The tier's name in answers."""
        ...

    def facts(self, context: RequestContext, budget_s: float) -> Mapping[str, Any]:
        """Return the tier's own fields of the policy's `Facts`; empty if it can always answer."""
        ...

    def rank(self, context: RequestContext) -> "TierResult | asyncio.Task[TierResult]":
        """Rank. Never raises: a failure is a result.

        An in-process tier returns its result. A remote tier starts its request and returns a task that ends within the
        request's budget; cancelling the task cancels the request.
        """
        ...
