"""The tier of stored lists: ranks by the list that the offline pipeline made for this user, which came with the features."""

from services.contracts.explanation import ListState
from services.contracts.recommend import Tier
from services.gateway.request.context import RequestContext
from services.gateway.tiers.tier import TierResult


class PrecomputedTier:
    """Returns the stored list."""

    tier = Tier.PRECOMPUTED

    def rank(self, context: RequestContext) -> TierResult:
        """Return the stored list; the policy chooses this tier only if the list covers the request."""
        return TierResult(ranking=context.listed)


def list_state(context: RequestContext) -> ListState:
    """Return why the user's stored list was or was not usable."""
    lookup, stored = context.lookup, context.lookup.features.precomputed
    if lookup.is_away or lookup.is_shed:
        return ListState.NOT_READ
    if stored is None:
        return ListState.NONE
    if context.listed is not None:
        return ListState.USABLE
    if stored.bundle_version != context.live.version:
        return ListState.OTHER_BUNDLE
    has_newer_events = context.has_recent_items or (
        lookup.features.newest_event_time_ms is not None and lookup.features.newest_event_time_ms > stored.watermark_ms
    )
    return ListState.OLDER_THAN_EVENTS if has_newer_events else ListState.DOES_NOT_COVER
