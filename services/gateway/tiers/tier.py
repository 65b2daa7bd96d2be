"""The port of a tier, and what a tier's ranking ends with."""

import asyncio
from dataclasses import dataclass
from typing import Protocol

from services.contracts.recommend import Reason, Tier
from services.gateway.request.candidates import ItemRanking
from services.gateway.request.context import RequestContext


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

    def rank(self, context: RequestContext) -> "TierResult | asyncio.Task[TierResult]":
        """Rank. Never raises: a failure is a result.

        A tier in this process returns its result. A remote tier starts its request and returns the task that waits for it,
        which ends within the request's budget; cancelling the task cancels the request.
        """
        ...
