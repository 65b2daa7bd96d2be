"""Why one request was answered as it was: what the gateway keeps for a while, and what `tailrace explain` shows.

The stored form is compact JSON; unknown fields are refused on reading, since writer and reader are of one release. Times
are milliseconds; `offset_ms` counts from the request's arrival.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any


class ListState(StrEnum):
    """What became of the list that is stored for the user."""

    NONE = "none"
    OTHER_BUNDLE = "other_bundle"
    OLDER_THAN_EVENTS = "older_than_events"
    DOES_NOT_COVER = "does_not_cover"
    USABLE = "usable"
    NOT_READ = "not_read"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """One stage of the request; stages may overlap (the student works while the LLM does)."""

    name: str
    offset_ms: float
    duration_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmPart:
    """How asking the LLM ended; the counts and times are the engine's own, None without a result in time."""

    outcome: str
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_steps: int | None = None
    queue_ms: float | None = None
    compute_ms: float | None = None
    decode_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One request. `outcome` is "ok" or the error's code; what a refusal cannot have is None or empty.

    `planned_tier` and `planned_reason` are the first decision, by `facts` (services.router.policy.Facts); `tier` and
    `reason` are how it ended.
    """

    request_id: str
    door: str
    outcome: str
    at_unix_ms: int
    message: str | None = None
    trace_id: str | None = None
    user_id: str | None = None
    caller: str | None = None
    priority: str | None = None
    tier: str | None = None
    reason: str | None = None
    planned_tier: str | None = None
    planned_reason: str | None = None
    bundle_version: str | None = None
    k: int | None = None
    num_items: int | None = None
    deadline_ms: int | None = None
    elapsed_ms: float | None = None
    feature_age_ms: int | None = None
    list_state: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    llm: LlmPart | None = None
    stages: tuple[StageTime, ...] = ()

    def as_plain(self) -> dict[str, Any]:
        """Give plain values, ready for JSON. By hand: `dataclasses.asdict` copies deeply and costs several times as much."""
        return {
            **{name: getattr(self, name) for name in _OWN_FIELDS},
            "facts": dict(self.facts),
            "llm": None if self.llm is None else {name: getattr(self.llm, name) for name in _LLM_FIELDS},
            "stages": [{name: getattr(stage, name) for name in _STAGE_FIELDS} for stage in self.stages],
        }

    def encode(self) -> bytes:
        """Give the stored form."""
        return json.dumps(self.as_plain(), separators=(",", ":"), ensure_ascii=False).encode()


def decode_explanation(stored: bytes) -> Explanation:
    """Read the stored form. Raises ValueError, KeyError or TypeError for anything else."""
    plain: dict[str, Any] = json.loads(stored)
    llm, stages = plain.pop("llm"), plain.pop("stages")
    return Explanation(
        **plain,
        llm=None if llm is None else LlmPart(**llm),
        stages=tuple(StageTime(**stage) for stage in stages),
    )


_STAGE_FIELDS = tuple(one.name for one in fields(StageTime))
_LLM_FIELDS = tuple(one.name for one in fields(LlmPart))
_OWN_FIELDS = tuple(one.name for one in fields(Explanation) if one.name not in {"facts", "llm", "stages"})
