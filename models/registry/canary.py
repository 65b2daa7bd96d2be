"""Canary: a version that serves a fraction of the users in parallel to the live version, by a salted hash of the user.

Pure. The hash is the same in every process and on every machine, so a user gets the same version from all gateways,
tiers and replicas, and after restarts. A release goes through stages with growing traffic fractions. A larger fraction
adds users and moves no user back. A stage begins at a time in the record, shortly after the record is written, so that
all processes have loaded the version and switch together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from models.documents import Count, Finite, TimeMs, Version
from models.errors import InvalidRequest

MAX_STAGES = 20
MAX_HOLD_S = 366 * 86_400.0


@dataclass(frozen=True, slots=True)
class CanaryStage:
    """A traffic fraction (above 0, at most 1), held for at least `hold_s` before the next stage."""

    share: Finite
    hold_s: Finite


def check_stages(stages: Sequence[CanaryStage]) -> tuple[CanaryStage, ...]:
    """Return the stages of a release after validation.

    Traffic fractions must grow from above 0 to at most 1; the first must leave users for comparison. Raises
    InvalidRequest naming the stage.
    """
    if not 1 <= len(stages) <= MAX_STAGES:
        raise InvalidRequest("stages", f"{len(stages)} stages are out of range", f"give 1 to {MAX_STAGES}")
    least = 0.0
    for index, stage in enumerate(stages):
        where = f"stages[{index}]"
        if not 0 < stage.share <= 1:
            raise InvalidRequest(
                f"{where}.share", f"{stage.share:.4g} is out of range", "give above 0 (0%) to 1 (100%)"
            )
        if stage.share <= least:
            raise InvalidRequest(
                f"{where}.share",
                f"{stage.share:.4g} is not above the previous stage's",
                "give shares that grow from stage to stage",
            )
        if not 0 <= stage.hold_s <= MAX_HOLD_S:
            raise InvalidRequest(
                f"{where}.hold_s", f"{stage.hold_s:g} s is out of range", f"give 0 to {MAX_HOLD_S:,.0f}"
            )
        least = stage.share
    if stages[0].share == 1:
        raise InvalidRequest(
            "stages[0].share",
            "100% of users leaves no users to compare with",
            "start with a smaller share, or promote the version",
        )
    return tuple(stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """A release in progress.

    Args:
        version: The candidate.
        salt: Salt of the hash, random for each release, so that different users get the candidates.
        stages: Traffic fractions in the order of the stages, growing.
        by: Who started the release.
        at: Start time (UTC, ISO 8601).
        stage: Index of the current stage.
        since_ms: Start (Unix ms) of the current stage's fraction.
        share_before: Traffic fraction until then.
        by_hand: Whether stages advance only manually.
        budgets: By guard metric, the relative loss that the candidate may have; absent metrics have their default.
        report: Report of the last analysis, as text.
        looked_ms: Time of the last analysis (Unix ms).
    """

    version: Version
    salt: str
    stages: tuple[CanaryStage, ...]
    by: str
    at: str
    stage: Count = 0
    since_ms: TimeMs = 0
    share_before: Finite = 0.0
    by_hand: bool = False
    budgets: Mapping[str, Finite] = field(default_factory=dict)
    report: str = ""
    looked_ms: TimeMs | None = None

    def share_at(self, now_ms: float) -> float:
        """Return the fraction of users who get the candidate at this time (Unix ms)."""
        return self.stages[self.stage].share if now_ms >= self.since_ms else self.share_before

    def takes(self, position: float, now_ms: float) -> bool:
        """Whether the user or session with this hash position in [0, 1) gets the candidate at this time (Unix ms)."""
        return position < self.share_at(now_ms)

    @property
    def is_last_stage(self) -> bool:
        return self.stage == len(self.stages) - 1

    @property
    def identity(self) -> tuple[str, str, int, int, bool]:
        """The state that an analysis result refers to: the release (by its salt), the stage, and the advance mode."""
        return self.version, self.salt, self.stage, self.since_ms, self.by_hand

    def moved(self, stage: int, since_ms: int, now_ms: float) -> Self:
        """Return the canary in this stage from `since_ms` (Unix ms) on, without the previous stage's report.

        Until then, the fraction at `now_ms` (Unix ms) applies. Raises InvalidRequest for an unknown stage.
        """
        self.check_stage(stage)
        share = self.share_at(now_ms)
        return replace(self, stage=stage, since_ms=since_ms, share_before=share, report="", looked_ms=None)

    def checked(self) -> Self:
        """Return the canary. Raises InvalidRequest for invalid stages or an unknown stage."""
        check_stages(self.stages)
        self.check_stage(self.stage)
        return self

    def check_stage(self, stage: int) -> None:
        """Raise InvalidRequest if the stage does not exist."""
        if not 0 <= stage < len(self.stages):
            raise InvalidRequest("stage", f"{stage} is out of range", f"give 0 to {len(self.stages) - 1}")
