"""The popular tier: recent popularity, in this process. No network on the request path, and it cannot fail.

The bundle's popularity is the prior; the stream worker's recent windows are read in the background and smoothed by it, so that a quiet hour does not
erase the prior and one fresh event does not lead the list. If the windows cannot be read, the last ones stay.
All items of each bundle that serves are ranked beside the event loop, after each reading and where it is loaded: at a million items it takes 0.1 s.
Items that only the live catalogue has are ranked with them, without training events: by recent use, then the newest first.
A request that is shed gets the head of its bundle's ranking, formatted once for all callers, which costs a fraction of the way
through history, masks and policy and holds the same items.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
import structlog

from services.contracts.features import RecentPopularity
from services.contracts.recommend import Filters, PopularIn, RecommendRequest, ScoredItem, Tier
from services.errors import DependencyUnavailable
from services.gateway.periodic_task import PeriodicTask
from services.gateway.request.candidates import ItemRanking, as_chosen, as_items, best_allowed
from services.gateway.request.context import RequestContext
from services.gateway.request.live_bundle import Live
from services.gateway.request.names import Names
from services.gateway.tiers.tier import TierResult
from services.items.layout import ItemLayout

log = structlog.get_logger()

_READ_TIMEOUT_S = 1.0
_NO_FILTERS = Filters()
_PRIOR_EVENTS = 50.0
"""As how many users of the last hour the training events of the most used item count, if it has so many."""


class PopularityWindows(Protocol):
    """Recent popularity, kept by the stream worker."""

    async def read_popular(self, timeout_s: float) -> RecentPopularity:
        """Return it; empty before the first events. Raises DependencyUnavailable."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PopularRanking:
    """All items of one bundle, most popular first: indices (num_items,) and their scores, in that order."""

    version: str
    order: np.ndarray
    scores: np.ndarray


@dataclass(frozen=True, slots=True)
class _Head:
    """The first items of a ranking that could be shown at a revision of the items."""

    ranking: PopularRanking
    revision: int
    items: tuple[ScoredItem, ...]


class PopularTier:
    """Owns the rankings and their formatted heads, each for as long as its bundle is used, and the task that refreshes them."""

    tier = Tier.POPULAR

    def __init__(self, names: Names, windows: PopularityWindows, refresh_s: float) -> None:
        self._names = names
        self._windows = windows
        self._recent = RecentPopularity()
        self._rankings: WeakKeyDictionary[Live, PopularRanking] = WeakKeyDictionary()
        self._heads: WeakKeyDictionary[Live, _Head] = WeakKeyDictionary()
        self._refreshing = PeriodicTask("popularity", self.refresh, refresh_s, at_once=True)
        self._refresh_lock = asyncio.Lock()
        names.before_swap(self._rank)

    def facts(self, context: RequestContext, budget_s: float) -> Mapping[str, object]:
        """Return nothing: this tier can always be asked."""
        return {}

    def rank(self, context: RequestContext) -> TierResult:
        """Return the most popular items that may be shown, enough to fill the answer beside other tiers' items.

        Where a window is asked for, its items are first, with their users in it as scores; the others follow with 0.
        """
        popular, showable = self.ranking(context.live), context.masks.showable
        indices, scores = best_allowed(
            popular.order, popular.scores, showable, max(2 * context.num_wanted, context.num_candidates)
        )
        subject = context.request.subject
        if isinstance(subject, PopularIn) and subject.window is not None:
            found = (
                (context.live.items.index(one), count) for one, count in self._recent.windows.get(subject.window, ())
            )
            counts = {index: float(count) for index, count in found if index is not None and index < len(showable)}
            others = {index: 0.0 for index in indices.tolist() if index not in counts}
            return TierResult(ranking=ItemRanking.in_order(Tier.POPULAR, counts | others))
        return TierResult(ranking=ItemRanking(Tier.POPULAR, indices, scores))

    def items_from_memory(self, request: RecommendRequest, live: Live) -> tuple[ScoredItem, ...] | None:
        """Return the k most popular items that may be shown; None if filters, rules, a subject or a small catalogue need the masks."""
        unwanted = {*request.excluded_item_ids, *(request.recent_item_ids if request.exclude_seen else ())}
        k = request.num_items
        num_needed = k + len(unwanted)
        if request.filters != _NO_FILTERS or request.rules.reorder or request.subject not in (None, PopularIn()):
            return None
        head = self._first(num_needed, live)
        if len(head) < num_needed:
            return None
        if not unwanted:
            return head[:k]
        return tuple(item for item in head[:num_needed] if item.item_id not in unwanted)[:k]

    def _first(self, num_items: int, live: Live) -> tuple[ScoredItem, ...]:
        """Return the most popular items that may be shown, at least so many if there are, formatted again where one was hidden or shown."""
        ranking, items, head = self.ranking(live), live.items, self._heads.get(live)
        if head is None or (head.ranking, head.revision) != (ranking, items.revision) or len(head.items) < num_items:
            revision = items.revision
            first = best_allowed(ranking.order, ranking.scores, items.columns.available, num_items)
            shown = as_items(as_chosen([ItemRanking(Tier.POPULAR, *first)]), items)
            head = self._heads[live] = _Head(ranking, revision, shown)
        return head.items

    def ranking(self, live: Live) -> PopularRanking:
        """Return the last ranking for this bundle, with the items that came since at its end."""
        found = self._rankings.get(live) or self._rank(live)
        if len(found.order) < (num_named := live.items.num_named):
            found = self._rankings[live] = with_newest(found, live.items, num_named)
        return found

    def _rank(self, live: Live) -> PopularRanking:
        """Rank this bundle's items by the last windows and keep the result. Called in several threads."""
        ranking = self._rankings[live] = rank_by_popularity(live.version, live.items, self._recent.weights)
        return ranking

    async def start(self) -> None:
        """Refresh in the background from now on."""
        self._refreshing.start()

    async def stop(self) -> None:
        """Stop refreshing; the last ranking stays."""
        await self._refreshing.stop()

    async def refresh(self) -> None:
        """Read the windows and rank again. Keeps the last ranking if they cannot be read.

        One at a time: an older reading, slow in its thread, would otherwise overwrite the ranking of a newer one.
        """
        async with self._refresh_lock:
            await self._read_and_rank()

    async def _read_and_rank(self) -> None:
        try:
            self._recent = await self._windows.read_popular(_READ_TIMEOUT_S)
        except DependencyUnavailable as error:
            log.warning("popularity_not_refreshed", error=repr(error))
            return
        for live in self._names.loaded:
            await asyncio.to_thread(self._rank, live)


def with_newest(ranking: PopularRanking, items: ItemLayout, num_named: int) -> PopularRanking:
    """Return a ranking with the items that it lacks behind all others, those published last first: nobody knows an event of theirs."""
    newest, published = np.arange(len(ranking.order), num_named), items.columns.numbers.get("published_ms")
    if published is not None:
        newest = newest[np.argsort(-np.nan_to_num(published.numbers[newest]), kind="stable")]
    scores = np.concatenate((ranking.scores, np.zeros(len(newest))))
    return PopularRanking(ranking.version, np.concatenate((ranking.order, newest)), scores)


def rank_by_popularity(version: str, items: ItemLayout, recent: Sequence[tuple[str, float]]) -> PopularRanking:
    """Rank every item by its share of pseudo-counts plus recent weights (users per hour): additive smoothing.

    Of items with the same score those published last come first, then the smaller index.

        score_i = (prior_i + recent_i) / sum_j (prior_j + recent_j)
        prior_i = events_i * min(1, 50 / max_j events_j)        of training events

    So an item that nobody has used leads an old data set after 50 users within an hour, one that was used half as often as the first after 25.
    """
    columns, num_named = items.columns, items.num_named
    num_events = columns.numbers["popularity"].numbers[:num_named]
    scores = num_events * min(1.0, _PRIOR_EVENTS / max(1.0, float(num_events.max(initial=0.0))))
    for item_id, weight in recent:
        index = items.index(item_id)
        if index is not None and index < len(scores):
            scores[index] += max(0.0, weight)
    total = float(scores.sum())
    if total > 0:
        scores /= total
    published = columns.numbers.get("published_ms")
    if published is None:
        order = np.argsort(-scores, kind="stable")
    else:
        order = np.lexsort((-np.nan_to_num(published.numbers[:num_named]), -scores))
    return PopularRanking(version, order, scores[order])
