"""The similar tier: neighbours of the items that a request names, from the live bundle's table. No network, a few microseconds.

Items that only the live catalogue has are in no table yet. Their neighbours are those with the most similar titles and categories, found in the background a few
seconds after they appear, and they are neighbours of those in turn, until a bundle that knows them is live.
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
from services.gateway.request.candidates import ItemRanking, as_chosen
from services.gateway.request.context import RequestContext
from services.gateway.request.live_bundle import Live
from services.gateway.request.names import Names
from services.gateway.tiers.tier import TierResult
from services.items.layout import ItemLayout
from services.items.words import WordIndex, text_of

log = structlog.get_logger()

REFRESH_S = 5.0
MAX_NEW_ITEMS = 10_000
"""Older ones beyond these have no neighbours until a bundle knows them."""
_NUM_NEIGHBOURS = 100
_LEAST_COSINE = 0.1

Neighbours = list[tuple[int, float]]
"""Indices and cosines, nearest first."""


@dataclass(frozen=True, slots=True, eq=False)
class NewItems:
    """What was found for one bundle: the words of its items, the texts of new items by index, their neighbours, and the new ones near the bundle's items.

    `revision` is that of the layout's words.
    """

    revision: int
    words: WordIndex
    texts: Mapping[int, str] = field(default_factory=dict)
    known_near: Mapping[int, Neighbours] = field(default_factory=dict)
    near: Mapping[int, Neighbours] = field(default_factory=dict)


class SimilarTier:
    """Returns neighbours. The popular tier fills what they leave open."""

    tier = Tier.SIMILAR

    def __init__(self, names: Names) -> None:
        self._names = names
        self._new: WeakKeyDictionary[Live, NewItems] = WeakKeyDictionary()
        self._refreshing = PeriodicTask("new_items", self.refresh, REFRESH_S)

    def facts(self, context: RequestContext, budget_s: float) -> Mapping[str, object]:
        """Return nothing: this tier answers what asks for it."""
        return {}

    def rank(self, context: RequestContext) -> TierResult:
        """Return the neighbours that may be shown."""
        live, showable = context.live, context.masks.showable
        named = live.items.indices(context.request.subject_item_ids)
        known = [index for index in named if index < live.items.num_known]
        ranking = ItemRanking(Tier.SIMILAR, *live.similar.best(known, showable, context.num_candidates))
        new = self._new.get(live)
        if new is not None and any(index in new.near for index in named):
            ranking = _with_new(ranking, named, live, new, showable, context.num_candidates)
        return TierResult(ranking=ranking)

    async def start(self) -> None:
        """Look for new items in the background from now on."""
        self._refreshing.start()

    async def stop(self) -> None:
        """Stop looking; what was found stays."""
        await self._refreshing.stop()

    async def refresh(self) -> None:
        """Find the neighbours of items that have appeared, or whose words have changed."""
        for live in self._names.loaded:
            try:
                found = await asyncio.to_thread(find_new, live.items, self._new.get(live))
            except Exception as error:  # noqa: BLE001 - whatever it fails at, requests go on without it
                log.warning("new_items_without_neighbours", version=live.version, error=repr(error))
                continue
            if found is not None:
                self._new[live] = found


def find_new(items: ItemLayout, before: NewItems | None) -> NewItems | None:
    """Return the neighbours of the items that only the live catalogue has; None where there are none. `before` is the last result for the same bundle."""
    revision = items.words_revision  # before the texts: what changes meanwhile is found the next time
    if before is not None and before.revision == revision:
        return before
    texts = _texts_of_new(items)
    if not texts:
        return None
    words = _index_of(items) if before is None else before.words
    among_new = WordIndex(list(texts.values()), words.rarity_W)
    places = list(texts)
    known_near: dict[int, Neighbours] = {}
    near: defaultdict[int, Neighbours] = defaultdict(list)
    for index, text in texts.items():
        kept = before.known_near[index] if before is not None and before.texts.get(index) == text else None
        known_near[index] = _near(words, text) if kept is None else kept
        new = [(places[place], cosine) for place, cosine in _near(among_new, text) if places[place] != index]
        near[index] = sorted(known_near[index] + new, key=lambda one: (-one[1], one[0]))[:_NUM_NEIGHBOURS]
        for other, cosine in known_near[index]:
            near[other].append((index, cosine))
    return NewItems(revision, words, texts, known_near, dict(near))


def _texts_of_new(items: ItemLayout) -> dict[int, str]:
    """Return the text of each item that the bundle lacks, of the newest ones by index."""
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


def _near(words: WordIndex, text: str) -> Neighbours:
    found, cosines = words.nearest(text, _NUM_NEIGHBOURS)
    return [one for one in zip(found.tolist(), cosines.tolist(), strict=True) if one[1] >= _LEAST_COSINE]


def _with_new(
    ranking: ItemRanking, named: list[int], live: Live, new: NewItems, showable: np.ndarray, num: int
) -> ItemRanking:
    """Return the neighbours with new items among them. Beside those of the table a cosine counts as that share of the nearest one's score."""
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
