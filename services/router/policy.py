"""Decides which tier answers, and why; the only place where Tailrace decides to degrade. Pure functions over facts.

1. `plan`, before anything is ranked: the best tier that can answer in time.
2. `fall_back`, after a tier ranked: if it failed, its fallback answers. The popular tier cannot fail.

Does not read a clock, the network or items: only the facts below.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from services.contracts.features import PrecomputedList
from services.contracts.recommend import Reason, Tier


class LlmOutcome(StrEnum):
    """How a request to the LLM ended.

    REFUSED: the replica rejected this request as invalid, which predicts nothing for the next request. MISMATCH: the
    replica serves another bundle, or no version is live yet. LOADING: the replica is loading the model. ABANDONED: the
    caller disconnected.
    """

    IN_TIME = "in_time"
    LATE = "late"
    OVERLOADED = "overloaded"
    UNAVAILABLE = "unavailable"
    FAILED = "failed"
    REFUSED = "refused"
    MISMATCH = "mismatch"
    LOADING = "loading"
    ABANDONED = "abandoned"


@dataclass(frozen=True, slots=True)
class RoutingDecision:
    """The tier that answers and the reason that the answer names."""

    tier: Tier
    reason: Reason


FALLBACKS: Mapping[Tier, Tier] = {
    Tier.PRECOMPUTED: Tier.POPULAR,
    Tier.LLM: Tier.STUDENT,
    Tier.STUDENT: Tier.POPULAR,
    Tier.SIMILAR: Tier.POPULAR,
}
"""The tier that answers if a tier has no ranking. The fallback of a remote tier ranks while the remote tier works."""


ASKED: Mapping[Reason, Tier] = {
    Reason.SIMILAR_ASKED: Tier.SIMILAR,
    Reason.POPULAR_ASKED: Tier.POPULAR,
    Reason.SEARCH_ASKED: Tier.POPULAR,
}
"""The lists that a request may ask for, which need no features, and their tiers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmRule:
    """The LLM needs at least `min_history` known items and, with `needs_gain`, a gain shown by the bundle."""

    min_history: int
    needs_gain: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that the plan depends on.

    `num_history` counts the catalogue items in this user's history (stored and sent along). `llm_pays`: for such a
    history the bundle's evaluation showed the LLM to rank better than the student, or routing does not depend on it.
    `is_loading`: the bundle is not in memory yet, only its popular items are known. `llm_allowed`, `student_allowed`:
    the surface has this tier. `is_trained`: the bundle has models, and they know an item that may be shown.
    `num_allowed` counts items that may be shown, `num_allowed_if_seen` the same with seen items
    allowed again. `list_covers`: the stored list is fresh and covers this request. `is_shed`: admission keeps this
    request from the features and the tiers that need them. `budget_s` is the time left for ranking. `asked` is set for
    a list that is about items, popularity or words, and not the user.
    """

    num_allowed: int
    num_allowed_if_seen: int
    asked: Reason | None = None
    list_covers: bool
    is_shed: bool
    features_unavailable: bool
    user_known: bool
    num_history: int
    min_history_for_llm: int
    llm_allowed: bool
    student_allowed: bool
    is_loading: bool = False
    is_trained: bool
    llm_pays: bool
    breaker_allows: bool
    num_in_flight: int
    max_in_flight: int
    predicted_s: float
    budget_s: float


def plan(facts: Facts) -> RoutingDecision:
    """Choose the best tier that can answer in time."""
    if facts.num_allowed == 0:
        return RoutingDecision(
            Tier.POPULAR, Reason.EVERYTHING_SEEN if facts.num_allowed_if_seen else Reason.NOTHING_ALLOWED
        )
    if facts.asked is not None:
        return RoutingDecision(ASKED[facts.asked], facts.asked)
    if facts.is_shed:
        return RoutingDecision(Tier.POPULAR, Reason.SHED)
    if facts.is_loading:
        return RoutingDecision(Tier.POPULAR, Reason.MODEL_LOADING)
    if not facts.is_trained:
        return RoutingDecision(Tier.POPULAR, Reason.NOT_TRAINED)
    if facts.list_covers:
        return RoutingDecision(Tier.PRECOMPUTED, Reason.PRECOMPUTED_FRESH)
    if facts.num_history == 0:
        return RoutingDecision(Tier.POPULAR, _no_history_reason(facts))
    refusal = _llm_refusal(facts)
    if refusal is None:
        return RoutingDecision(Tier.LLM, Reason.LLM_IN_TIME)
    if not facts.student_allowed:
        return RoutingDecision(Tier.POPULAR, Reason.NOT_ON_SURFACE)
    return RoutingDecision(Tier.STUDENT, refusal)


def failure_of(outcome: LlmOutcome) -> Reason | None:
    """Return the reason why the LLM's answer cannot be used; None if it can."""
    match outcome:
        case LlmOutcome.IN_TIME:
            return None
        case LlmOutcome.LATE:
            return Reason.LLM_LATE
        case LlmOutcome.OVERLOADED:
            return Reason.LLM_OVERLOADED
        case LlmOutcome.UNAVAILABLE:
            return Reason.LLM_UNAVAILABLE
        case LlmOutcome.MISMATCH:
            return Reason.BUNDLE_MISMATCH
        case LlmOutcome.LOADING:
            return Reason.MODEL_LOADING
        case LlmOutcome.FAILED | LlmOutcome.REFUSED | LlmOutcome.ABANDONED:
            return Reason.LLM_FAILED


def fall_back(decision: RoutingDecision, failure: Reason | None) -> RoutingDecision:
    """Return the decision after its tier ranked: the same, or the tier's fallback for the reason of its failure."""
    return decision if failure is None else RoutingDecision(FALLBACKS[decision.tier], failure)


def list_is_fresh(stored: PrecomputedList, *, row_us: int | None, has_recent_items: bool) -> bool:
    """Whether a stored list was made from the user's row as it is now.

    Event times say nothing: late events change it too.
    """
    return row_us == stored.made_from_row_us and not has_recent_items


def list_covers(*, shows_seen: bool, holds_seen: bool, num_survivors: int, num_allowed: int, k: int) -> bool:
    """Whether a fresh list covers this request. A list without seen items does not cover a request that shows them."""
    return (holds_seen or not shows_seen) and num_survivors >= min(k, num_allowed)


def _no_history_reason(facts: Facts) -> Reason:
    if facts.features_unavailable:
        return Reason.FEATURES_UNAVAILABLE
    return Reason.SHORT_HISTORY if facts.user_known else Reason.UNKNOWN_USER


def _llm_refusal(facts: Facts) -> Reason | None:
    if facts.features_unavailable:
        return Reason.FEATURES_UNAVAILABLE
    if not facts.llm_allowed:
        return Reason.NOT_ON_SURFACE
    if facts.num_history < facts.min_history_for_llm:
        return Reason.SHORT_HISTORY
    if not facts.llm_pays:
        return Reason.STUDENT_SUFFICES
    if not facts.breaker_allows:
        return Reason.LLM_UNAVAILABLE
    if facts.num_in_flight >= facts.max_in_flight:
        return Reason.LLM_OVERLOADED
    fits = facts.budget_s > 0 and facts.predicted_s <= facts.budget_s
    return None if fits else Reason.LLM_TOO_SLOW
