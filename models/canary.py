"""A canary: a version that a share of the users gets beside the live one, by a salted hash of who they are. Pure.

The hash is the same in every process and on every machine, so a user has the same version at all doors, tiers and replicas and after restarts.
A release goes through stages of growing shares. A larger share adds users and moves none back. A stage begins at a time that its record names, a while
after the record is written, so that all processes have the version loaded by then and change over together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from models.documents import Count, Finite, Schema, TimeMs, Version
from models.errors import InvalidRequest

MAX_STAGES = 20
MAX_HOLD_S = 366 * 86_400.0


@dataclass(frozen=True, slots=True)
class Stage:
    """A share of the users (above 0, at most 1), held for at least `hold_s` before the next one."""

    share: float
    hold_s: float


def check_stages(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Return the stages of a release: shares grow from above 0 to at most 1, and the first leaves users to compare with. Raises InvalidRequest, which names the stage."""
    if not 1 <= len(stages) <= MAX_STAGES:
        raise InvalidRequest("stages", f"there are {len(stages)}", f"give 1 to {MAX_STAGES}")
    least = 0.0
    for place, stage in enumerate(stages):
        where = f"stages[{place}]"
        if not 0 < stage.share <= 1:
            raise InvalidRequest(f"{where}.share", f"{stage.share:.4g} is no share", "give above 0 (0%) to 1 (100%)")
        if stage.share <= least:
            raise InvalidRequest(
                f"{where}.share",
                f"{stage.share:.4g} is not above the stage before",
                "shares must grow from stage to stage",
            )
        if not 0 <= stage.hold_s <= MAX_HOLD_S:
            raise InvalidRequest(
                f"{where}.hold_s", f"{stage.hold_s:g} s is out of range", f"give 0 to {MAX_HOLD_S:,.0f}"
            )
        least = stage.share
    if stages[0].share == 1:
        raise InvalidRequest(
            "stages[0].share",
            "all users at once leaves nobody to compare with",
            "begin with less, or promote the version",
        )
    return tuple(stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """A release under way.

    Args:
        version: The candidate.
        salt: Of the hash; one of its own for each release, so that it is not always the same users who get what is new.
        stages: Shares in the order in which they are reached, growing.
        by: Who began it.
        at: When (UTC, ISO 8601).
        stage: The index of the stage that it is in.
        since_ms: From when (Unix ms) that stage's share holds; before, that of the stage before it.
        by_hand: Whether stages are left by a person alone.
        budgets: By guard metric, the share by which the candidate may be worse; others have their usual one.
        report: What was found at the last look, in words.
        looked_ms: When that was (Unix ms).
    """

    version: str
    salt: str
    stages: tuple[Stage, ...]
    by: str
    at: str
    stage: int = 0
    since_ms: int = 0
    by_hand: bool = False
    budgets: Mapping[str, float] = field(default_factory=dict)
    report: str = ""
    looked_ms: int | None = None

    def share_at(self, now_ms: float) -> float:
        """Return the share of users who get the candidate at this time (Unix ms)."""
        place = self.stage if now_ms >= self.since_ms else self.stage - 1
        return self.stages[place].share if place >= 0 else 0.0

    def takes(self, place: float, now_ms: float) -> bool:
        """Whether the user, or visitor's session, whose hash with the salt is this place in [0, 1) gets the candidate at this time (Unix ms)."""
        return place < self.share_at(now_ms)

    @property
    def is_last_stage(self) -> bool:
        """Whether there is no larger share to go to."""
        return self.stage == len(self.stages) - 1

    @property
    def identity(self) -> tuple[str, str, int, int, bool]:
        """What an analysis of it holds for: this release, which its salt identifies, in this stage, and how it may be left."""
        return self.version, self.salt, self.stage, self.since_ms, self.by_hand

    def moved(self, stage: int, since_ms: int) -> Self:
        """Return it in this stage from then on (Unix ms). What was reported is of the stage before. Raises InvalidRequest for a stage that it has not."""
        self.check_stage(stage)
        return replace(self, stage=stage, since_ms=since_ms, report="", looked_ms=None)

    def check_stage(self, stage: int) -> None:
        """Raise InvalidRequest unless it has this stage."""
        if not 0 <= stage < len(self.stages):
            raise InvalidRequest("stage", f"there is no stage {stage}", f"give 0 to {len(self.stages) - 1}")


class _StoredStage(Schema):
    share: Finite
    hold_s: Finite


class StoredCanary(Schema):
    """A canary as a name's record holds it."""

    version: Version
    salt: str
    stages: list[_StoredStage]
    by: str
    at: str
    stage: Count
    since_ms: TimeMs
    by_hand: bool
    budgets: dict[str, Finite]
    report: str
    looked_ms: TimeMs | None

    def canary(self) -> Canary:
        """Return the canary. Raises InvalidRequest for stages or a stage that a release cannot have."""
        stages = check_stages([Stage(one.share, one.hold_s) for one in self.stages])
        canary = Canary(**{**dict(self), "stages": stages})
        canary.check_stage(self.stage)
        return canary
