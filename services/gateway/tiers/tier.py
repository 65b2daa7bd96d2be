"""The ports of a tier, and what a tier's ranking ends with."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from services.contracts.recommend import Reason, RecommendRequest, ScoredItem, Tier
from services.gateway.request.candidates import ItemRanking
from services.gateway.request.context import RequestContext
from services.gateway.request.live_bundle import Live


@dataclass(frozen=True, slots=True, kw_only=True)
class TierResult:
    """A ranking, or the reason why the tier has none. The ranking may be empty or shorter than requested."""

    ranking: ItemRanking | None = None
    failure: Reason | None = None


class RankingTier(Protocol):
    """One way to rank. Which tier may answer a request is decided by `services.router.policy` alone, from facts."""

    @property
    def tier(self) -> Tier:
        """The tier's name in answers."""
        ...

    def facts(self, context: RequestContext, budget_s: float) -> Mapping[str, Any]:
        """Return the fields of the policy's `Facts` that this tier knows of itself; empty if it can always be asked."""
        ...

    def rank(self, context: RequestContext) -> "TierResult | asyncio.Task[TierResult]":
        """Rank. Never raises: a failure is a result.

        A tier in this process returns its result. A remote tier starts its request and returns the task that waits for it,
        which ends within the request's budget; cancelling the task cancels the request.
        """
        ...


class LastTier(RankingTier, Protocol):
    """The tier that answers when no other does, and fills what the others leave open. It cannot fail, and needs nothing beyond this process."""

    def rank(self, context: RequestContext) -> TierResult:
        """Rank at once."""
        ...

    def items_from_memory(self, request: RecommendRequest, live: Live) -> tuple[ScoredItem, ...] | None:
        """Return the answer to a request that is shed; None if it needs the context that is read for a request in full."""
        ...
