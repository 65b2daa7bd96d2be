"""The similar tier: neighbours of the request's subject items, from the live bundle's table, within microseconds.

Items that only the live catalogue has are not in the table yet. A background task finds the items with the most similar
titles and categories within a few seconds; these are neighbours in both directions until a bundle with the items is
promoted.
"""

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from weakref import WeakKeyDictionary

import numpy as np
import structlog

from services.contracts.recommend import Tier
from services.gateway.periodic_task import PeriodicTask
from services.gateway.ranking import ItemRanking, as_chosen
from services.gateway.request.context import RequestContext
from services.gateway.request.live_bundle import Live
from services.gateway.request.names import Names
from services.gateway.tiers.tier import TierResult
from services.items.layout import ItemLayout
from services.items.words import WordIndex, text_of

log = structlog.get_logger()

REFRESH_S = 5.0
MAX_NEW_ITEMS = 10_000
"""Beyond this many new items, the oldest have no neighbours until a bundle knows them."""
_NUM_NEIGHBOURS = 100
_LEAST_COSINE = 0.1

Neighbours = list[tuple[int, float]]
"""Indices and cosines, nearest first."""


@dataclass(frozen=True, slots=True, eq=False)
class NeighboursOfNewItems:
    """Search results for one bundle: the words of its items, the texts of new items by index, and the neighbours.

    `known_near` and `new_near` hold each new item's neighbours among the bundle's and the new items; `near` holds all
    of them, in both directions. `revision` is the words revision of the layout. `num_searched` counts the searches
    since the previous result.
    """

    revision: int
    words: WordIndex
    texts: Mapping[int, str] = field(default_factory=dict)
    known_near: Mapping[int, Neighbours] = field(default_factory=dict)
    new_near: Mapping[int, Neighbours] = field(default_factory=dict)
    near: Mapping[int, Neighbours] = field(default_factory=dict)
    num_searched: int = 0


class SimilarTier:
    """Returns neighbours. The popular tier fills the remaining positions."""

    tier = Tier.SIMILAR

    def __init__(self, names: Names) -> None:
        self._names = names
        self._new: WeakKeyDictionary[Live, NeighboursOfNewItems] = WeakKeyDictionary()
        self._refreshing = PeriodicTask("new_items", self.refresh, REFRESH_S)

    def facts(self, context: RequestContext, budget_s: float) -> Mapping[str, object]:
        """Return no facts: the request itself selects this tier."""
        return {}

    def rank(self, context: RequestContext) -> TierResult:
        """Return the allowed neighbours."""
        live, showable = context.live, context.masks.showable
        named = live.items.indices(context.request.subject_item_ids)
        known = [index for index in named if index < live.items.num_known]
        ranking = ItemRanking(Tier.SIMILAR, *live.similar.best(known, showable, context.num_candidates))
        new = self._new.get(live)
        if new is not None and any(index in new.near for index in named):
            ranking = _with_new(ranking, named, live, new, showable, context.num_candidates)
        return TierResult(ranking=ranking)

    async def start(self) -> None:
        """Start searching for new items in the background."""
        self._refreshing.start()

    async def stop(self) -> None:
        """Stop searching; results stay."""
        await self._refreshing.stop()

    async def refresh(self) -> None:
        """Find the neighbours of items that are new or whose words have changed."""
        for live in self._names.loaded:
            try:
                neighbours = await asyncio.to_thread(find_new, live.items, self._new.get(live))
            except Exception as error:  # noqa: BLE001 - requests are answered without the new neighbours
                log.warning("new_items_without_neighbours", version=live.version, error=repr(error))
                continue
            if neighbours is not None:
                self._new[live] = neighbours


def find_new(items: ItemLayout, before: NeighboursOfNewItems | None) -> NeighboursOfNewItems | None:
    """Return the neighbours of the items that only the live catalogue has; None without such items.

    `before` is the last result for the same bundle: only items whose words changed since, and their neighbours, are
    searched again.
    """
    revision = items.words_revision  # read before the texts: the next search finds concurrent changes
    if before is not None and before.revision == revision:
        return before
    texts = _texts_of_new(items)
    if not texts:
        return None
    before = before or NeighboursOfNewItems(revision, _index_of(items))
    return _Search(before, texts).found(revision)


class _Search:
    """One incremental step from a result to the next."""

    def __init__(self, before: NeighboursOfNewItems, texts: dict[int, str]) -> None:
        self._before = before
        self._texts = texts
        self._places = list(texts)
        self._changed = [index for index, text in texts.items() if before.texts.get(index) != text]
        self._moved = {*self._changed, *(before.texts.keys() - texts.keys())}
        self._among_new = WordIndex(list(texts.values()), before.words.rarity_W)
        self._num_searched = 0

    def found(self, revision: int) -> NeighboursOfNewItems:
        """Return the result."""
        before, changed, moved = self._before, self._changed, self._moved
        known_near = {index: near for index, near in before.known_near.items() if index not in moved}
        known_near |= {index: self._search(before.words, self._texts[index]) for index in changed}
        new_near, touched = self._new_near()
        near = {index: row for index, row in before.near.items() if index not in moved}
        for index in touched:
            near[index] = _nearest(known_near[index] + new_near[index])
        self._turn_round(near, known_near)
        return NeighboursOfNewItems(revision, before.words, self._texts, known_near, new_near, near, self._num_searched)

    def _new_near(self) -> tuple[dict[int, Neighbours], set[int]]:
        """Return the new neighbours of each new item, and the items whose neighbours changed."""
        before, moved = self._before.new_near, self._moved
        rows = {index: self._search_new(index) for index in self._changed}
        come: defaultdict[int, Neighbours] = defaultdict(list)
        for index, row in rows.items():
            for other, cosine in row:
                if other not in rows:
                    come[other].append((index, cosine))
        new_near = {index: row[:_NUM_NEIGHBOURS] for index, row in rows.items()}
        touched = set(rows)
        for index, row in before.items():
            if index in moved:
                continue
            kept = [neighbour for neighbour in row if neighbour[0] not in moved]
            if len(kept) < len(row) == _NUM_NEIGHBOURS:  # an item beyond the cut may move up
                new_near[index] = self._search_new(index)[:_NUM_NEIGHBOURS]
            else:
                new_near[index] = _nearest(kept + come[index]) if index in come else kept
            if index in come or len(kept) < len(row):
                touched.add(index)
        return new_near, touched

    def _turn_round(self, near: dict[int, Neighbours], known_near: Mapping[int, Neighbours]) -> None:
        """Update the new neighbours of the bundle's items."""
        removed = {other for index in self._moved for other, _ in self._before.known_near.get(index, ())}
        come: defaultdict[int, Neighbours] = defaultdict(list)
        for index in self._changed:
            for other, cosine in known_near[index]:
                come[other].append((index, cosine))
        for other in removed | come.keys():
            row = sorted(
                [neighbour for neighbour in near.pop(other, ()) if neighbour[0] not in self._moved] + come[other]
            )
            if row:
                near[other] = row

    def _search_new(self, index: int) -> Neighbours:
        neighbours = self._search(self._among_new, self._texts[index], len(self._places))
        return [(self._places[position], cosine) for position, cosine in neighbours if self._places[position] != index]

    def _search(self, words: WordIndex, text: str, num: int = _NUM_NEIGHBOURS) -> Neighbours:
        self._num_searched += 1
        positions, cosines = words.nearest(text, num)
        return [
            neighbour
            for neighbour in zip(positions.tolist(), cosines.tolist(), strict=True)
            if neighbour[1] >= _LEAST_COSINE
        ]


def _nearest(neighbours: Neighbours) -> Neighbours:
    return sorted(neighbours, key=lambda neighbour: (-neighbour[1], neighbour[0]))[:_NUM_NEIGHBOURS]


def _texts_of_new(items: ItemLayout) -> dict[int, str]:
    """Return the texts of the items missing from the bundle, by index, at most the newest MAX_NEW_ITEMS."""
    first = max(items.num_known, items.num_named - MAX_NEW_ITEMS)
    column = items.columns.texts["categories"]
    return {
        index: text_of(items.title(index), items.item_id(index), column.values[column.codes[index]])
        for index in range(first, min(items.num_named, len(column.codes)))
    }


def _index_of(items: ItemLayout) -> WordIndex:
    catalogue = items.catalogue
    rows = zip(catalogue.titles, catalogue.item_ids, catalogue.categories, strict=True)
    return WordIndex([text_of(title, item_id, categories) for title, item_id, categories in rows])


def _with_new(
    ranking: ItemRanking, named: list[int], live: Live, new: NeighboursOfNewItems, showable: np.ndarray, num: int
) -> ItemRanking:
    """Return the neighbours with new items merged in.

    A new item's score is its cosine times the nearest table neighbour's score.
    """
    num_known = live.items.num_known
    sums: defaultdict[int, float] = defaultdict(float)
    share = sum(index < num_known for index in named) / len(named)
    sums.update({index: score * share for index, score, _ in as_chosen([ranking])})
    for index in named:
        has_row = index < num_known and live.similar.scores_VN.shape[1] > 0
        highest = float(live.similar.scores_VN[index, 0]) if has_row else 1.0
        for other, cosine in new.near.get(index, ()):
            sums[other] += highest * cosine / len(named)
    order = sorted(sums, key=lambda index: (-sums[index], index))
    kept = islice((index for index in order if index < len(showable) and showable[index]), num)
    return ItemRanking.in_order(Tier.SIMILAR, {index: sums[index] for index in kept})
