"""Decides from a canary's analysis whether it is withdrawn, advanced, promoted or left, and writes its record. Pure."""

from dataclasses import asdict, dataclass, replace
from enum import StrEnum

from models.registry.canary import Canary
from models.registry.release_report import GuardReport, ReleaseReport
from pipelines.experiments.verdict import Affected, AnalysisResult, Outcome
from pipelines.release.counts import StageResults
from pipelines.release.guards import judge, mismatch

MAX_STRAY_SHARE = 0.1
"""Fraction of lists to the candidate's users that the live version may have made in a release that still advances;
above it, the candidate is not served as intended."""

MAX_FAILING = 0.01
"""Fraction of all requests that may fail when no control is left, for a release that still ends with a promotion."""


class Act(StrEnum):
    """Action for a release."""

    STAY = "stay"
    WITHDRAW = "withdraw"
    MOVE_ON = "move on"
    PROMOTE = "promote"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The action and its reason, with the analysis result, the record's report, and whether users were lost.

    The analysis result is None without a control.
    """

    act: Act
    reason: str
    verdict: AnalysisResult | None
    report: ReleaseReport
    lost_users: bool = False


def decide(canary: Canary, seen: StageResults, now_ms: int) -> Decision:
    """Decide from all records since the stage began (`canary.since_ms`)."""
    stage = canary.stages[canary.stage]
    analysis = judge(canary, seen, now_ms) if stage.share < 1 else None
    if analysis is not None and analysis.outcome is Outcome.WORSE:
        return _decision(Act.WITHDRAW, analysis.reason, canary, seen, analysis, now_ms)
    if stopped := mismatch(canary, seen):
        return replace(_decision(Act.STAY, stopped, canary, seen, analysis, now_ms), lost_users=True)
    lacking = _lacking(canary, seen, analysis, now_ms)
    if lacking:
        return _decision(Act.STAY, "; ".join(lacking), canary, seen, analysis, now_ms)
    act = Act.PROMOTE if canary.is_last_stage else Act.MOVE_ON
    reason = analysis.reason if analysis is not None else "all users have it"
    if canary.by_hand:
        return _decision(Act.STAY, f"waits for `tailrace release --next`; {reason}", canary, seen, analysis, now_ms)
    return _decision(act, reason, canary, seen, analysis, now_ms)


def _lacking(canary: Canary, seen: StageResults, analysis: AnalysisResult | None, now_ms: int) -> list[str]:
    """Return the reasons that keep the release in its stage; empty if it may advance."""
    lacking = []
    if not seen.num_lists[0]:
        lacking.append("no user has received a list of it yet")
    elif seen.stray_share > MAX_STRAY_SHARE:
        lacking.append(
            f"the live version made {seen.stray_share:.0%} of its users' lists: some gateways do not serve it"
        )
    errors = seen.counts.get("errors")
    if analysis is None and isinstance(errors, Affected) and errors.lists is not None:
        failing = errors.lists.candidate.mean
        if failing > MAX_FAILING:
            lacking.append(f"{failing:.1%} of all requests fail, and {MAX_FAILING:.0%} may")
    if analysis is not None and analysis.outcome not in (Outcome.BETTER, Outcome.NO_WORSE):
        lacking.append(analysis.reason)
    left_s = canary.stages[canary.stage].hold_s - (now_ms - canary.since_ms) / 1_000
    if left_s > 0:
        lacking.append(f"the stage lasts {left_s:,.0f} s more")
    return lacking


def _decision(
    act: Act, reason: str, canary: Canary, seen: StageResults, analysis: AnalysisResult | None, now_ms: int
) -> Decision:
    report = ReleaseReport(
        act=act.value,
        outcome=analysis.outcome.value if analysis is not None else "",
        reason=reason,
        stage=canary.stage,
        share=canary.stages[canary.stage].share,
        elapsed_s=round((now_ms - canary.since_ms) / 1_000),
        users=seen.num_users,
        lists=seen.num_lists,
        guards=tuple(GuardReport(**asdict(reading)) for reading in (analysis.readings if analysis is not None else ())),
    )
    return Decision(act=act, reason=reason, verdict=analysis, report=report)
