"""One request with everything that is known before a tier ranks: features, history, masks, stored list, and its stage timer.

An unavailable feature store is a fact here, not an error. Decides nothing: `services.router.policy` decides by these facts.
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
from services.contracts.recommend import PopularIn, RecommendRequest, SimilarTo, Tier
from services.gateway.request.candidates import NUM_CANDIDATES, ItemRanking, Masks, masks_for, merge_history
from services.gateway.request.live_bundle import Live
from services.gateway.surfaces.surface import Surface
from services.items.expression import Compiled
from services.observability.tracing import here, span
from services.router.deadline import Deadline
from services.router.policy import Facts, list_covers, list_is_fresh

log = structlog.get_logger()

NUM_COMPARED = 10
"""How many of the best items of LLM and student are compared, however many a request asks for."""
_ASKED: Mapping[type, Tier] = {SimilarTo: Tier.SIMILAR, PopularIn: Tier.POPULAR}


class Features(Protocol):
    """The feature store."""

    async def read(self, user_id: str, bundle_version: str, timeout_s: float) -> UserFeatures:
        """Return a user's features with the list of this bundle, within `timeout_s` and never later; an unknown user has none.

        Raises DependencyUnavailable or DeadlineExceeded.
        """
        ...

    async def read_many(
        self, user_ids: Sequence[str], bundle_version: str, timeout_s: float
    ) -> Mapping[str, UserFeatures]:
        """Return the features of these users by id, in one exchange; those that cannot be told now are left out. Raises as `read` does."""
        ...


class StageTimer:
    """Measures the stages of one request that arrived at `arrived_s` on the same clock. Stages may overlap.

    In a traced request each stage is a span too, a child of the span that was open when the request began.
    """

    def __init__(self, clock: Callable[[], float], arrived_s: float) -> None:
        self._clock = clock
        self._arrived_s = arrived_s
        self._parent = here()
        self._spent: dict[str, tuple[float, float]] = {}
        """Copied where it is read: a student that ran out of time ends in its thread, and adds its stage at any moment."""

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
        """Return the milliseconds of each stage measured so far, to the microsecond."""
        return {stage: round(seconds * 1_000, 3) for stage, (_, seconds) in self._spent.copy().items()}

    def raw(self) -> list[tuple[str, float, float]]:
        """Return (stage, seconds from arrival to its beginning, seconds) for each stage measured so far."""
        return [
            (stage, started_s - self._arrived_s, seconds) for stage, (started_s, seconds) in self._spent.copy().items()
        ]


@dataclass(frozen=True, slots=True)
class FeatureLookup:
    """The outcome of reading a user's features; empty if the store is unavailable, was not read, or the visitor is anonymous."""

    features: UserFeatures
    is_unavailable: bool = False
    is_shed: bool = False


UNREAD = FeatureLookup(UserFeatures(), is_shed=True)
"""The lookup of a request that is shed: nothing was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """A request, ready to be routed and ranked. `history` holds catalogue indices, `history_item_ids` all ids, oldest first.

    `listed` is the stored list if it is fresh and covers this request. `stages` is the only mutable part: whoever works on
    the request measures its time there.
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

    @property
    def num_wanted(self) -> int:
        """How many items an answer should hold: k, or fewer if fewer may be shown."""
        return min(self.request.num_items, self.masks.num_showable)

    @property
    def num_candidates(self) -> int:
        """How many candidates an answer is chosen from: as many as it holds, or more where rules reorder them or exploration draws from them."""
        most = self.request.num_items if self.surface.explore is None else self.surface.explore.of
        if self.request.rules.reorder:
            most = max(2 * self.request.num_items, NUM_CANDIDATES)
        return min(max(most, self.request.num_items), self.masks.num_showable)

    @property
    def num_ranked(self) -> int:
        """How many items the student ranks, and the LLM as many as it has beams for: enough to compare them too."""
        return min(max(self.num_candidates, NUM_COMPARED), self.masks.num_showable)

    def num_from_beams(self, beam_width: int) -> int:
        """How many items the LLM ranks: it has `beam_width` beams where fewer are wanted, so that many cost no more."""
        return min(self.num_ranked, max(self.request.num_items, NUM_COMPARED, beam_width))

    @property
    def has_recent_items(self) -> bool:
        """Whether the request names items that the store has not seen yet."""
        return len(self.history_item_ids) > len(self.lookup.features.history_item_ids)

    def facts(self, of_tiers: Iterable[Mapping[str, Any]], budget_s: float) -> Facts:
        """Return the facts that the policy decides by: those of the request here, and those that each tier states of itself."""
        return Facts(
            num_allowed=self.masks.num_allowed,
            num_allowed_if_seen=self.masks.num_allowed_if_seen,
            asked=_ASKED.get(type(self.request.subject)),
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
    except Exception as error:  # noqa: BLE001 - whatever the store fails at, the request is answered without features
        log.warning("features_unavailable", error=repr(error))
        return FeatureLookup(UserFeatures(), is_unavailable=True)


def avoided(request: RecommendRequest, features: UserFeatures, now_s: float) -> tuple[str, ...]:
    """Return what the request leaves out because the user was shown it a short while before `now_s` (Unix s)."""
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
) -> RequestContext:
    """Compose the history, the masks and the stored list. `expressions` has the masks of the request's clauses."""
    history_item_ids = merge_history(lookup.features.history_item_ids, request.recent_item_ids)
    disliked = lookup.features.disliked_item_ids
    masks = masks_for(request, history_item_ids, live.items, disliked, expressions)
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
