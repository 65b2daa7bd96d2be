"""What a request that is shed gets: the head of the popular ranking, spelled out once for everybody. Asks nobody.

Costs a fraction of the way through history, masks and policy, and gives the same items; requests whose filters need that way
take it. Knows no priority and no deadline.
"""

from services.contracts.recommend import Filters, RecommendRequest, ScoredItem, Tier
from services.gateway.request.candidates import as_items
from services.gateway.tiers.live_bundle import Live
from services.gateway.tiers.popular import Popular, PopularRanking

_NO_FILTERS = Filters()


class FromMemory:
    """Keeps the first items of the newest popular ranking as the answers have them; more as more are asked for."""

    def __init__(self, popular: Popular) -> None:
        self._popular = popular
        self._ranking: PopularRanking | None = None
        self._head: tuple[ScoredItem, ...] = ()

    def items(self, request: RecommendRequest, live: Live) -> tuple[ScoredItem, ...] | None:
        """Return the k most popular items that may be shown; None when filters, or few items, need a closer look."""
        unwanted = {*request.exclude_item_ids, *(request.recent_item_ids if request.exclude_seen else ())}
        num_needed = request.k + len(unwanted)
        if request.filters != _NO_FILTERS or num_needed > len(live.catalogue.item_ids):
            return None
        head = self._first(num_needed, live)
        if not unwanted:
            return head[: request.k]
        return tuple(item for item in head[:num_needed] if item.item_id not in unwanted)[: request.k]

    def _first(self, num_items: int, live: Live) -> tuple[ScoredItem, ...]:
        ranking, catalogue = self._popular.ranking(live.version, live.catalogue), live.catalogue
        if ranking is not self._ranking or len(self._head) < num_items:
            first = zip(ranking.order[:num_items].tolist(), ranking.scores[:num_items].tolist(), strict=True)
            self._head = as_items(((index, score, Tier.POPULAR) for index, score in first), catalogue)
            self._ranking = ranking
        return self._head
