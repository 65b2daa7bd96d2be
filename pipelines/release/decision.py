"""What follows from what was seen of a canary: it is withdrawn, moved on, promoted or left, and what its record says of it. Pure.

A report is one JSON document, which the record of the name holds: command and console show it.
"""

import json
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from models.canary import Canary
from pipelines.experiments.verdict import Outcome, Verdict
from pipelines.release.counts import Seen
from pipelines.release.guards import judge

MAX_STRAY_SHARE = 0.1
"""Part of the candidate's users' lists that the live version may have made, where a release still goes on: beyond, the candidate is not served as it should be."""
_MAX_REASON_CHARS = 500


class Act(StrEnum):
    """What is to be done."""

    STAY = "stay"
    WITHDRAW = "withdraw"
    MOVE_ON = "move on"
    PROMOTE = "promote"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What is to be done and why, the verdict (None where there is no control), and the text for the record."""

    act: Act
    reason: str
    verdict: Verdict | None
    report: str


def decide(canary: Canary, seen: Seen, now_ms: int) -> Decision:
    """Decide after a look at all that was recorded since the stage began, which it has (`canary.since_ms`)."""
    stage = canary.stages[canary.stage]
    found = judge(canary, seen, now_ms) if stage.share < 1 else None
    if found is not None and found.outcome is Outcome.WORSE:
        return _decision(Act.WITHDRAW, found.reason, canary, seen, found, now_ms)
    lacking = _lacking(canary, seen, found, now_ms)
    if lacking:
        return _decision(Act.STAY, "; ".join(lacking), canary, seen, found, now_ms)
    act = Act.PROMOTE if canary.is_last_stage else Act.MOVE_ON
    reason = found.reason if found is not None else "all users have it"
    if canary.by_hand:
        return _decision(Act.STAY, f"{reason}; `tailrace release --next` goes on", canary, seen, found, now_ms)
    return _decision(act, reason, canary, seen, found, now_ms)


def _lacking(canary: Canary, seen: Seen, found: Verdict | None, now_ms: int) -> list[str]:
    """Return what keeps the release in its stage; nothing where it may go on."""
    lacking = []
    if not seen.num_lists[0]:
        lacking.append("nobody was shown a list of it yet")
    elif seen.stray_share > MAX_STRAY_SHARE:
        lacking.append(
            f"the live version made {seen.stray_share:.0%} of its users' lists: gateways do not all serve it"
        )
    if found is not None and found.outcome not in (Outcome.BETTER, Outcome.NO_WORSE):
        lacking.append(found.reason)
    left_s = canary.stages[canary.stage].hold_s - (now_ms - canary.since_ms) / 1_000
    if left_s > 0:
        lacking.append(f"the stage lasts {left_s:,.0f} s more")
    return lacking


def _decision(act: Act, reason: str, canary: Canary, seen: Seen, found: Verdict | None, now_ms: int) -> Decision:
    report = {
        "act": act.value,
        "outcome": found.outcome.value if found is not None else "",
        "reason": reason[:_MAX_REASON_CHARS],
        "stage": canary.stage,
        "share": canary.stages[canary.stage].share,
        "elapsed_s": round((now_ms - canary.since_ms) / 1_000),
        "users": seen.num_users,
        "lists": seen.num_lists,
        "guards": [
            {
                "name": one.name,
                "state": one.state.value,
                "worse_by": _finite(one.worse_by),
                "low": _finite(one.low),
                "high": _finite(one.high),
                "lacks": one.lacks,
            }
            for one in (found.readings if found is not None else ())
        ],
    }
    return Decision(act=act, reason=reason, verdict=found, report=json.dumps(report, separators=(",", ":")))


def decode_report(text: str) -> dict[str, Any] | None:
    """Read a record's report; None where there is none yet, or one in other words."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "guards" in found else None


def _finite(value: float) -> float | None:
    """Return a number that JSON has, None for the others."""
    return round(value, 4) if math.isfinite(value) else None
