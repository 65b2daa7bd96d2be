"""The similar tier: neighbours of the items that a request names, from the live bundle's table. No network, a few microseconds."""

from collections.abc import Mapping

from services.contracts.recommend import Tier
from services.gateway.request.candidates import ItemRanking
from services.gateway.request.context import RequestContext
from services.gateway.tiers.tier import TierResult


class SimilarTier:
    """Returns neighbours. The popular tier fills what they leave open."""

    tier = Tier.SIMILAR

    def facts(self, context: RequestContext, budget_s: float) -> Mapping[str, object]:
        """Return nothing: this tier answers what asks for it."""
        return {}

    def rank(self, context: RequestContext) -> TierResult:
        """Return the neighbours that may be shown."""
        live = context.live
        named = live.catalogue.indices(
            context.request.subject_item_ids
        )  # the live catalogue's own have no neighbours yet
        best = live.similar.best(named, context.masks.showable, context.num_candidates)
        return TierResult(ranking=ItemRanking(Tier.SIMILAR, *best))
