"""The tier of stored lists: ranks by the list that the offline pipeline made for this user, read with the features."""

from collections.abc import Mapping

from services.contracts.explanation import ListState
from services.contracts.recommend import Tier
from services.gateway.request.context import RequestContext
from services.gateway.tiers.tier import TierResult
from services.router.policy import list_is_fresh


class PrecomputedTier:
    """Returns the stored list."""

    tier = Tier.PRECOMPUTED

    def facts(self, context: RequestContext, budget_s: float) -> Mapping[str, bool]:
        """Return whether the stored list covers the request and the surface allows it."""
        return {"list_covers": context.listed is not None and self.tier in context.surface.tiers}

    def rank(self, context: RequestContext) -> TierResult:
        """Return the stored list; the policy chooses this tier only if the list covers the request."""
        return TierResult(ranking=context.listed)


def list_state(context: RequestContext) -> ListState:
    """Return why the user's stored list was or was not usable."""
    lookup, stored = context.lookup, context.lookup.features.precomputed
    if lookup.is_unavailable or lookup.is_shed:
        return ListState.NOT_READ
    if stored is None:
        return ListState.NONE
    if context.listed is not None:
        return ListState.USABLE
    fresh = list_is_fresh(stored, row_us=lookup.features.as_of_us, has_recent_items=context.has_recent_items)
    return ListState.DOES_NOT_COVER if fresh else ListState.OLDER_THAN_EVENTS
