"""The guards of a release: metrics that a candidate must not worsen, budgets, and each stage's evidence. Pure."""

import math
from collections.abc import Mapping
from dataclasses import replace

from models.registry.canary import Canary
from pipelines.experiments.sequential import mismatch_p_value
from pipelines.experiments.verdict import ALPHA, Affected, AnalysisResult, Guard, Means, verdict
from pipelines.release.counts import TIMED_TIERS, StageResults
from services.errors import ConfigError

GUARDS = (
    Guard(name="errors", effect=0.5, tolerance=0.005),
    Guard(name="refusals", effect=0.5, tolerance=0.005, weight=0.5),
    Guard(name="missing", effect=0.5, tolerance=0.005, weight=0.5),
    Guard(name="deadline_misses", effect=0.5, tolerance=0.01),
    Guard(name="popular", budget=0.1, effect=0.5, tolerance=0.01),
    Guard(name="latency", budget=0.1, effect=0.1),
    *(Guard(name=f"latency:{tier}", budget=0.1, effect=0.1, weight=0.5, is_awaited=False) for tier in TIMED_TIERS),
    Guard(name="variety", higher_is_worse=False, budget=0.05, effect=0.1, weight=0.5),
    Guard(name="clicks", higher_is_worse=False, effect=0.1, weight=6, is_objective=True),
)
"""Guards by measure: failures, refusals, empty lists, missed deadlines and popular-only answers count affected users;
the rest are milliseconds, distance of lists, and clicks per list.

Clicks are rare relative to the evidence required, so half of the allowed false alarms are theirs.
"""
MEANINGS: Mapping[str, str] = {
    "errors": "users with a request that failed, or with an answer for which something failed",
    "refusals": "users with a request that was refused, or answered from memory",
    "missing": "users with an empty list",
    "deadline_misses": "users with an answer after its deadline",
    "popular": "users with a list of the popular tier",
    "latency": "milliseconds to an answer, in all and by tier",
    "variety": "fraction of a list that is not in the previous list, which is another user's",
    "clicks": "clicked items per list",
}
MISMATCH_ALPHA = 0.005
"""Part of ALPHA for a mismatch of users."""
_WHERE_THERE_ARE_ANY = frozenset({"clicks", "variety"})
_LARGEST_EFFECT, _LARGEST_TOLERANCE = 0.9, 0.2


def check_budgets(budgets: Mapping[str, float]) -> None:
    """Raise ConfigError for a budget of an unknown guard, or a budget outside of [0, 1)."""
    for name, budget in budgets.items():
        if name not in MEANINGS:
            raise ConfigError(f"--budget {name}: unknown guard; give one of {', '.join(MEANINGS)}")
        if not 0 <= budget < 1:
            raise ConfigError(f"--budget {name}: {budget:.0%} is out of range; give 0% to below 100%")


def guards_of(canary: Canary, seen: StageResults) -> tuple[Guard, ...]:
    """Return the guards of the canary's stage.

    A stage of few users only has to exclude large losses: the required bound scales with the inverse root of its
    traffic fraction, as the achievable bound does. Clicks and variety are awaited if there are any.
    """
    judged = [stage.share for stage in canary.stages if stage.share < 1]
    factor = math.sqrt(max(judged) / canary.stages[canary.stage].share)
    return tuple(
        replace(
            guard,
            budget=canary.budgets.get(guard.name.partition(":")[0], guard.budget),
            effect=min(_LARGEST_EFFECT, guard.effect * factor),
            tolerance=min(_LARGEST_TOLERANCE, guard.tolerance * factor),
            is_awaited=guard.is_awaited
            and (guard.name not in _WHERE_THERE_ARE_ANY or _has_any(seen.counts[guard.name])),
        )
        for guard in GUARDS
    )


def judge(canary: Canary, seen: StageResults, now_ms: float) -> AnalysisResult:
    """Return the analysis result of the canary's stage, whose traffic fraction is below 1.

    A release's stages divide its allowed false alarms.
    """
    stage = canary.stages[canary.stage]
    return verdict(
        guards_of(canary, seen),
        seen.counts,
        share=seen.share,
        elapsed_s=(now_ms - canary.since_ms) / 1_000,
        limit_s=stage.hold_s,
        alpha=(ALPHA - MISMATCH_ALPHA) / _num_judged(canary),
    )


def mismatch(canary: Canary, seen: StageResults) -> str:
    """Return a sentence if users are not divided as the hash divides them; empty otherwise.

    Then users were lost, and the remaining users are not comparable. May be checked at any time: over all stages, an
    analysis without lost users is stopped in at most `MISMATCH_ALPHA` of releases.
    """
    shares = seen.new_share, 1 - seen.new_share
    if not 0 < seen.new_share < 1 or not any(seen.num_new):
        return ""
    alpha = MISMATCH_ALPHA / _num_judged(canary) / 2 ** (seen.num_halvings + 1)
    if mismatch_p_value(seen.num_new, shares) >= alpha:
        return ""
    fraction = seen.num_new[0] / sum(seen.num_new)
    return (
        f"users are missing: the candidate has {fraction:.2%} of the users, and the hash assigns it {shares[0]:.2%}. "
        "The comparison is invalid; check whether gateways of one version crash, then release again"
    )


def _num_judged(canary: Canary) -> int:
    """Return the number of stages with a control."""
    return sum(stage.share < 1 for stage in canary.stages)


def _has_any(counts: Means | Affected) -> bool:
    return isinstance(counts, Means) and counts.control.total > 0
