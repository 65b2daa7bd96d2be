"""One request with everything that is found out about it before any tier ranks: features, history, masks, stored list.

Reads the features within a time box; that they are away is a fact here, not an error. Decides nothing: the facts that it
gathers are for `services.router.policy`.
"""

import uuid
from dataclasses import dataclass
from typing import Protocol

import structlog

from services.contracts.access import Caller
from services.contracts.features import UserFeatures
from services.contracts.rank import RankRequest
from services.contracts.recommend import RecommendRequest, Tier
from services.gateway.request.candidates import Masks, Ranking, masks_for, merge_history
from services.gateway.tiers.live_bundle import Live
from services.observability.tracing import trace_headers
from services.router.deadline import Deadline
from services.router.gate import LlmView
from services.router.policy import Facts, list_covers, list_is_fresh

log = structlog.get_logger()


class Features(Protocol):
    """The feature store."""

    async def read(self, user_id: str, timeout_s: float) -> UserFeatures:
        """Return a user's features, within `timeout_s` and never later; an unknown user has none.

        Raises DependencyAway or DeadlineExceeded.
        """
        ...


@dataclass(frozen=True, slots=True)
class FeatureLookup:
    """What the feature store said of the user; nothing, when it is away, was not asked, or the visitor is anonymous."""

    features: UserFeatures
    is_away: bool = False
    is_shed: bool = False


UNREAD = FeatureLookup(UserFeatures(), is_shed=True)
"""What is known of a user whose request is shed: nobody was asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """A request, ready to be routed and ranked. `history` holds catalogue indices, `history_item_ids` all ids, oldest first.

    `listed` is the stored list when it is fresh and answers this very request. `num_wanted` is k, or fewer when fewer items
    may be shown.
    """

    request: RecommendRequest
    caller: Caller
    deadline: Deadline
    live: Live
    known: FeatureLookup
    history_item_ids: tuple[str, ...]
    history: list[int]
    masks: Masks
    listed: Ranking | None

    @property
    def num_wanted(self) -> int:
        """How many items an answer should hold."""
        return min(self.request.k, self.masks.num_showable)

    def facts(self, llm: LlmView, min_history_for_llm: int, budget_s: float) -> Facts:
        """Gather what the policy decides by."""
        return Facts(
            num_allowed=self.masks.num_allowed,
            num_allowed_if_seen=self.masks.num_allowed_if_seen,
            list_covers=self.listed is not None,
            is_shed=self.known.is_shed,
            features_away=self.known.is_away,
            user_known=self.known.features.num_events > 0,
            num_history=len(self.history),
            min_history_for_llm=min_history_for_llm,
            breaker_allows=llm.breaker_allows,
            num_in_flight=llm.num_in_flight,
            max_in_flight=llm.max_in_flight,
            predicted_s=llm.predicted_s,
            trial_s=llm.trial_s,
            budget_s=budget_s,
        )

    def for_llm(self, deadline_unix_s: float) -> RankRequest:
        """Put the question to the LLM, under an id of its own: callers may use one id twice at once."""
        seen = self.history_item_ids if self.request.exclude_seen else ()
        return RankRequest(
            request_id=f"{self.request.request_id}.{uuid.uuid4().hex}",
            user_id=self.request.user_id,
            bundle_version=self.live.version,
            history_item_ids=self.history_item_ids,
            k=self.num_wanted,
            deadline_unix_s=deadline_unix_s,
            excluded_item_ids=tuple(dict.fromkeys(seen + self.request.exclude_item_ids)),
            filters=self.request.filters,
            priority=self.caller.priority,
            trace=trace_headers(),
        )


async def look_up_features(features: Features, user_id: str | None, timeout_s: float) -> FeatureLookup:
    """Read a user's features; the store enforces `timeout_s`. Never raises."""
    if user_id is None:
        return FeatureLookup(UserFeatures())
    try:
        return FeatureLookup(await features.read(user_id, timeout_s))
    except Exception as error:  # noqa: BLE001 - whatever the store fails at, the request is answered without features
        log.warning("features_away", error=repr(error))
        return FeatureLookup(UserFeatures(), is_away=True)


def build_context(
    request: RecommendRequest, caller: Caller, deadline: Deadline, live: Live, known: FeatureLookup
) -> RequestContext:
    """Compose the history, the masks and the stored list. Pure."""
    history_item_ids = merge_history(known.features.history_item_ids, request.recent_item_ids)
    masks = masks_for(request, history_item_ids, live.catalogue)
    has_recent_items = len(history_item_ids) > len(known.features.history_item_ids)
    return RequestContext(
        request=request,
        caller=caller,
        deadline=deadline,
        live=live,
        known=known,
        history_item_ids=history_item_ids,
        history=live.catalogue.indices(history_item_ids),
        masks=masks,
        listed=_listed(request, live, known.features, masks, has_recent_items=has_recent_items),
    )


def _listed(
    request: RecommendRequest, live: Live, features: UserFeatures, masks: Masks, *, has_recent_items: bool
) -> Ranking | None:
    stored = features.precomputed
    if stored is None or not list_is_fresh(
        stored,
        live_version=live.version,
        newest_event_time_ms=features.newest_event_time_ms,
        has_recent_items=has_recent_items,
    ):
        return None
    ranking = Ranking.of(Tier.PRECOMPUTED, stored.item_ids, stored.scores, live.catalogue)
    num_survivors = int(masks.allowed[sorted(set(ranking.indices))].sum())
    covers = list_covers(
        exclude_seen=request.exclude_seen, num_survivors=num_survivors, num_allowed=masks.num_allowed, k=request.k
    )
    return ranking if covers else None
