"""A request with everything known before a tier ranks: features, history, masks, stored list and stage timer.

An unavailable feature store is a fact here, not an error. `services.router.policy` decides by these facts.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import structlog
from opentelemetry.trace import Span, SpanKind

from services.contracts.access import Caller
from services.contracts.features import UserFeatures
from services.contracts.recommend import PopularIn, Reason, RecommendRequest, SearchFor, SimilarTo, Tier
from services.gateway.ranking import NUM_CANDIDATES, ItemRanking
from services.gateway.request.live_bundle import Live
from services.gateway.request.masks import Masks, masks_for, merge_history
from services.gateway.request.wish import ReadWish
from services.gateway.surfaces.surface import Surface
from services.items.expression import Compiled
from services.observability.tracing import here, span
from services.router.deadline import Deadline
from services.router.policy import Facts, list_covers, list_is_fresh

log = structlog.get_logger()

NUM_COMPARED = 10
"""Number of top items compared between LLM and student, independent of the request's k."""
_ASKED: Mapping[type, Reason] = {SimilarTo: Reason.SIMILAR_ASKED, PopularIn: Reason.POPULAR_ASKED}
_NUM_WISHED = 20_000
"""Number of items that a tier ranks for a wish, which may fit any of them."""


class Features(Protocol):
    """The feature store."""

    async def read(self, user_id: str, bundle_version: str, timeout_s: float) -> UserFeatures:
        """Return a user's features with the stored list of this bundle, within `timeout_s`; an unknown user has none.

        Raises DependencyUnavailable or DeadlineExceeded.
        """
        ...

    async def read_many(
        self, user_ids: Sequence[str], bundle_version: str, timeout_s: float
    ) -> Mapping[str, UserFeatures]:
        """Return the features of these users by id, in one exchange; skips users that cannot be read now.

        Raises as `read` does.
        """
        ...


class StageTimer:
    """Measures the stages of a request that arrived at `arrived_s` on the same clock. Stages may overlap.

    In a traced request each stage is also a span, a child of the span that was open when the request began.
    """

    def __init__(self, clock: Callable[[], float], arrived_s: float) -> None:
        self._clock = clock
        self._arrived_s = arrived_s
        self._parent = here()
        self._spent: dict[str, tuple[float, float]] = {}
        """Readers copy this dict: a student that timed out may still add its stage from its thread."""

    @contextmanager
    def measure(self, stage: str, kind: SpanKind = SpanKind.INTERNAL) -> Iterator[Span]:
        """Measure the block as this stage, and yield its span."""
        started_s = self._clock()
        try:
            with span(stage, kind, under=self._parent) as opened:
                yield opened
        finally:
            self._spent[stage] = (started_s, self._clock() - started_s)

    def as_ms(self) -> dict[str, float]:
        """Return the milliseconds of each stage measured so far, rounded to microseconds."""
        return {stage: round(seconds * 1_000, 3) for stage, (_, seconds) in self._spent.copy().items()}

    def raw(self) -> list[tuple[str, float, float]]:
        """Return (stage, start in seconds after arrival, duration in seconds) for each stage measured so far."""
        return [
            (stage, started_s - self._arrived_s, seconds) for stage, (started_s, seconds) in self._spent.copy().items()
        ]


@dataclass(frozen=True, slots=True)
class FeatureLookup:
    """Result of reading a user's features; empty if the store is unavailable or unread, or the visitor is anonymous."""

    features: UserFeatures
    is_unavailable: bool = False
    is_shed: bool = False


UNREAD = FeatureLookup(UserFeatures(), is_shed=True)
"""The lookup of a shed request, which reads nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """A request ready for routing and ranking.

    `history` holds catalogue indices, `history_item_ids` all ids, oldest first. `listed` is the stored list if it is
    fresh and covers this request. `wish` is None without a wish, and if it was not read. Only `stages` is mutable:
    every part that works on the request records its time there.
    """

    request: RecommendRequest
    surface: Surface
    caller: Caller
    deadline: Deadline
    live: Live
    lookup: FeatureLookup
    history_item_ids: tuple[str, ...]
    history: list[int]
    masks: Masks
    expressions: Compiled
    listed: ItemRanking | None
    stages: StageTimer
    wish: ReadWish | None = None

    @property
    def num_wanted(self) -> int:
        """Number of items that an answer should hold: k, or fewer if fewer are allowed."""
        return min(self.request.num_items, self.masks.num_showable)

    @property
    def num_candidates(self) -> int:
        """Number of candidates that an answer is chosen from: more than its length for rules or exploration."""
        most = self.request.num_items if self.surface.explore is None else self.surface.explore.of
        if self.request.rules.reorder:
            most = max(2 * self.request.num_items, NUM_CANDIDATES)
        return min(max(most, self.request.num_items), self.masks.num_showable)

    @property
    def num_ranked(self) -> int:
        """Number of items that the student ranks: enough for the comparison with the LLM too, and for a wish."""
        least = NUM_COMPARED if self.wish is None else _NUM_WISHED
        return min(max(self.num_candidates, least), self.masks.num_showable)

    def num_from_beams(self, beam_width: int) -> int:
        """Return the number of items that the LLM ranks: up to `beam_width` even if fewer are needed, at no cost."""
        return min(self.num_ranked, max(self.request.num_items, NUM_COMPARED, beam_width))

    @property
    def has_recent_items(self) -> bool:
        """Whether the request names items that the store has not seen yet."""
        return len(self.history_item_ids) > len(self.lookup.features.history_item_ids)

    @property
    def _asked(self) -> Reason | None:
        """The reason of a list that is not about the user; a search is not without a user's history."""
        if isinstance(self.request.subject, SearchFor):
            return None if self.history_item_ids or self.request.user_id is not None else Reason.SEARCH_ASKED
        return _ASKED.get(type(self.request.subject))

    def facts(self, of_tiers: Iterable[Mapping[str, Any]], budget_s: float) -> Facts:
        return Facts(
            num_allowed=self.masks.num_allowed,
            num_allowed_if_seen=self.masks.num_allowed_if_seen,
            asked=self._asked,
            is_shed=self.lookup.is_shed,
            features_unavailable=self.lookup.is_unavailable,
            user_known=self.lookup.features.num_events > 0,
            num_history=len(self.history),
            budget_s=budget_s,
            **{name: fact for facts in of_tiers for name, fact in facts.items()},
        )


async def look_up_features(
    features: Features, user_id: str | None, bundle_version: str, timeout_s: float
) -> FeatureLookup:
    """Read a user's features; the store enforces `timeout_s`. Never raises."""
    if user_id is None:
        return FeatureLookup(UserFeatures())
    try:
        return FeatureLookup(await features.read(user_id, bundle_version, timeout_s))
    except Exception as error:  # noqa: BLE001 - without features the request is still answered
        log.warning("features_unavailable", error=repr(error))
        return FeatureLookup(UserFeatures(), is_unavailable=True)


def avoided(request: RecommendRequest, features: UserFeatures, now_s: float) -> tuple[str, ...]:
    """Return the items excluded because the user saw them within `avoid_shown_s` before `now_s` (Unix s)."""
    if request.avoid_shown_s is None:
        return ()
    since_s = now_s - request.avoid_shown_s
    return tuple(item_id for item_id, last_s in features.shown_times_s.items() if last_s >= since_s)


def build_context(
    request: RecommendRequest,
    surface: Surface,
    caller: Caller,
    deadline: Deadline,
    live: Live,
    lookup: FeatureLookup,
    stages: StageTimer,
    expressions: Compiled,
    wish: ReadWish | None = None,
) -> RequestContext:
    """Compute the history, the masks and the stored list. `expressions` holds the masks of the request's clauses."""
    history_item_ids = merge_history(lookup.features.history_item_ids, request.recent_item_ids)
    disliked = lookup.features.disliked_item_ids
    unwished = None if wish is None else wish.excluded
    masks = masks_for(request, history_item_ids, live.items, disliked, expressions, unwished)
    has_recent_items = len(history_item_ids) > len(lookup.features.history_item_ids)
    return RequestContext(
        request=request,
        surface=surface,
        caller=caller,
        deadline=deadline,
        live=live,
        lookup=lookup,
        history_item_ids=history_item_ids,
        history=live.catalogue.indices(history_item_ids),
        masks=masks,
        expressions=expressions,
        listed=_usable_list(request, live, lookup.features, masks, has_recent_items=has_recent_items),
        stages=stages,
        wish=wish,
    )


def _usable_list(
    request: RecommendRequest, live: Live, features: UserFeatures, masks: Masks, *, has_recent_items: bool
) -> ItemRanking | None:
    stored = features.precomputed
    if stored is None or not all(map(math.isfinite, stored.scores)):
        return None
    if not list_is_fresh(stored, row_us=features.as_of_us, has_recent_items=has_recent_items):
        return None
    ranking = ItemRanking.of(Tier.PRECOMPUTED, stored.item_ids, stored.scores, live.catalogue)
    num_survivors = int(masks.allowed[sorted(set(ranking.indices))].sum())
    covers = list_covers(
        shows_seen=not request.exclude_seen,
        holds_seen=live.repeats,
        num_survivors=num_survivors,
        num_allowed=masks.num_allowed,
        k=request.num_items,
    )
    return ranking if covers else None
