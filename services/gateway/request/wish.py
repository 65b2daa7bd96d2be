"""A wish as read, and the items that it excludes from a request. Pure.

Only exclusions limit the items; wanted and liked terms move scores. If they leave no item, seen items come back
first; then the exclusions are relaxed, and the answer says so.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from models.wishes.reading import Exclusion, Reading
from services.contracts.filters import Condition, Expression, OneOf, Range, all_of
from services.contracts.recommend import Filters, RecommendRequest, Understood
from services.gateway.request.masks import Masks

MUST_NOT = "must_not"


@dataclass(frozen=True, slots=True, eq=False)
class ReadWish:
    """A reading, and the matches of a search's words with titles (n,) by item index; each may be missing.

    `relaxed` names the parts that were not applied.
    """

    reading: Reading | None = None
    titles: np.ndarray | None = None
    relaxed: tuple[str, ...] = ()

    @property
    def excluded(self) -> np.ndarray | None:
        """The excluded items (n,) bool by item index, unless relaxed."""
        return None if self.reading is None or self.relaxed else self.reading.excluded

    @property
    def understood(self) -> Understood | None:
        """The answer's part; None if the wish was not read."""
        if self.reading is None:
            return None
        understood = self.reading.understood
        return Understood(
            must=understood.must,
            must_not=understood.must_not,
            liked=understood.liked,
            reader=understood.reader,
            relaxed=self.relaxed,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Limited:
    """A request with a wish's exclusions as filters, and whether items that the user has seen are too little."""

    request: RecommendRequest
    wish: ReadWish | None
    needs_unseen: bool = False

    def leaves_items(self, masks: Masks) -> bool:
        return bool(masks.num_allowed if self.needs_unseen else masks.num_showable)


def limits_of(request: RecommendRequest, wish: ReadWish | None) -> Iterator[Limited]:
    """Yield the request under a wish's exclusions, the strictest first, and last without them."""
    reading = None if wish is None else wish.reading
    if wish is not None and reading is not None and (reading.excluded is not None or reading.exclusions):
        limited = Limited(_with(request, reading.exclusions), wish, needs_unseen=True)
        yield limited
        yield replace(limited, needs_unseen=False)
        yield Limited(request, replace(wish, relaxed=(MUST_NOT,)))
    else:
        yield Limited(request, wish)


def _with(request: RecommendRequest, exclusions: Sequence[Exclusion]) -> RecommendRequest:
    """Return the request with these exclusions added to its filters, so that every tier applies them."""
    own = request.filters
    excluding = Expression.of(must_not=[_condition(exclusion) for exclusion in exclusions])
    filters = Filters.of(
        all_of(own.expression, excluding or None), categories=own.categories, allowed_item_ids=own.allowed_item_ids
    )
    return msgspec.structs.replace(request, filters=filters)


def _condition(exclusion: Exclusion) -> Condition:
    test = OneOf(exclusion.values) if exclusion.values else Range(gte=exclusion.first, lte=exclusion.last)
    return Condition.of(exclusion.attribute, test)
