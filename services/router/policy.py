"""Which tier answers, and why: the one place where Tailrace decides to degrade. Pure functions over facts.

Three moments decide:
1. `plan`, before anything is ranked: the best tier that can answer in time;
2. `after_llm`, once the LLM came back, failed, or ran out of time: the LLM's answer, or the student's;
3. `after_student`, when the student could not rank: popularity.

Knows no clock, no network and no items: only the facts below.
"""

from dataclasses import dataclass
from enum import StrEnum

from services.contracts.features import PrecomputedList
from services.contracts.recommend import Reason, Tier


class LlmOutcome(StrEnum):
    """How asking the LLM ended.

    REFUSED: this one question was not to its liking, which says nothing of the next. MISMATCH: it serves another bundle, or
    none yet. ABANDONED: the caller went away, nobody waits for a route.
    """

    IN_TIME = "in_time"
    LATE = "late"
    OVERLOADED = "overloaded"
    AWAY = "away"
    FAILED = "failed"
    REFUSED = "refused"
    MISMATCH = "mismatch"
    ABANDONED = "abandoned"


@dataclass(frozen=True, slots=True)
class Route:
    """The tier that answers and the reason that the caller is told."""

    tier: Tier
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that the plan depends on.

    `num_history` counts the items of the catalogue that are known of this user (stored and sent along). `num_allowed`
    counts items that may be shown, `num_allowed_if_seen` the same with seen items allowed again. `list_covers` says that
    the precomputed list is fresh and answers this very request. `is_shed` says that admission keeps this request from the
    features and the tiers behind them. `budget_s` is the time left for ranking.
    """

    num_allowed: int
    num_allowed_if_seen: int
    list_covers: bool
    is_shed: bool
    features_away: bool
    user_known: bool
    num_history: int
    min_history_for_llm: int
    breaker_allows: bool
    num_in_flight: int
    max_in_flight: int
    predicted_s: float
    trial_s: float
    budget_s: float


def plan(facts: Facts) -> Route:
    """Choose the best tier that can answer. Tier LLM means: ask it, and have the student ready."""
    if facts.num_allowed == 0:
        return Route(Tier.POPULAR, Reason.EVERYTHING_SEEN if facts.num_allowed_if_seen else Reason.NOTHING_ALLOWED)
    if facts.is_shed:
        return Route(Tier.POPULAR, Reason.SHED)
    if facts.list_covers:
        return Route(Tier.PRECOMPUTED, Reason.PRECOMPUTED_FRESH)
    if facts.num_history == 0:
        return Route(Tier.POPULAR, _why_no_history(facts))
    refusal = _why_not_llm(facts)
    return Route(Tier.LLM, Reason.LLM_IN_TIME) if refusal is None else Route(Tier.STUDENT, refusal)


def after_llm(outcome: LlmOutcome) -> Route:
    """Choose between the LLM's answer and the student's that waits beside it."""
    match outcome:
        case LlmOutcome.IN_TIME:
            return Route(Tier.LLM, Reason.LLM_IN_TIME)
        case LlmOutcome.LATE:
            return Route(Tier.STUDENT, Reason.LLM_LATE)
        case LlmOutcome.OVERLOADED:
            return Route(Tier.STUDENT, Reason.LLM_OVERLOADED)
        case LlmOutcome.AWAY:
            return Route(Tier.STUDENT, Reason.LLM_AWAY)
        case LlmOutcome.MISMATCH:
            return Route(Tier.STUDENT, Reason.BUNDLE_MISMATCH)
        case LlmOutcome.FAILED | LlmOutcome.REFUSED | LlmOutcome.ABANDONED:
            return Route(Tier.STUDENT, Reason.LLM_FAILED)


def after_student(route: Route, *, student_ranked: bool) -> Route:
    """Fall to popularity when the student's answer is wanted and there is none."""
    if route.tier is Tier.STUDENT and not student_ranked:
        return Route(Tier.POPULAR, Reason.STUDENT_FAILED)
    return route


def list_is_fresh(
    stored: PrecomputedList, *, live_version: str, newest_event_time_ms: int | None, has_recent_items: bool
) -> bool:
    """Whether a stored list was made by the live bundle and has seen all that is known of the user."""
    if stored.bundle_version != live_version or has_recent_items:
        return False
    return newest_event_time_ms is None or newest_event_time_ms <= stored.watermark_ms


def list_covers(*, exclude_seen: bool, num_survivors: int, num_allowed: int, k: int) -> bool:
    """Whether a fresh list answers this request. Lists hold no seen items: a request that wants those is not covered."""
    return exclude_seen and num_survivors >= min(k, num_allowed)


def _why_no_history(facts: Facts) -> Reason:
    if facts.features_away:
        return Reason.FEATURES_AWAY
    return Reason.SHORT_HISTORY if facts.user_known else Reason.UNKNOWN_USER


def _why_not_llm(facts: Facts) -> Reason | None:
    if facts.features_away:
        return Reason.FEATURES_AWAY
    if facts.num_history < facts.min_history_for_llm:
        return Reason.SHORT_HISTORY
    if not facts.breaker_allows:
        return Reason.LLM_AWAY
    if facts.num_in_flight >= facts.max_in_flight:
        return Reason.LLM_OVERLOADED
    return None if _fits(facts) else Reason.LLM_TOO_SLOW


def _fits(facts: Facts) -> bool:
    """Whether the prediction fits; a lone request may go by the decayed one, so that a slow spell can end."""
    predicted_s = facts.trial_s if facts.num_in_flight == 0 else facts.predicted_s
    return facts.budget_s > 0 and predicted_s <= facts.budget_s
