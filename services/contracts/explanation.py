"""The explanation of a request: the record that the gateway keeps for a while, and that `tailrace explain` shows.

Times are milliseconds; `offset_ms` counts from the request's arrival.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta
from pydantic_core import from_json, to_json

from services.contracts.message import Answer
from services.contracts.recommend import Understood


class ListState(StrEnum):
    """Whether the user's stored list was usable, and if not, why."""

    NONE = "none"
    OLDER_THAN_EVENTS = "older_than_events"
    DOES_NOT_COVER = "does_not_cover"
    USABLE = "usable"
    NOT_READ = "not_read"


class StageTime(Answer, frozen=True):
    """One stage of the request; stages may overlap (the student works while the LLM does)."""

    name: Annotated[str, Meta(examples=["features"])]
    offset_ms: Annotated[float, Meta(description="From the request's arrival to its beginning")]
    duration_ms: float


class LlmPart(Answer, frozen=True):
    """How the request to the LLM ended; counts and times are the engine's, null without a timely result."""

    outcome: Annotated[str, Meta(examples=["in_time"])]
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_steps: int | None = None
    queue_ms: float | None = None
    compute_ms: float | None = None
    decode_ms: float | None = None


class RuledItem(Answer, frozen=True):
    """One item's position (from 1) before any rule and after all rules; null if the item was not in that list."""

    item_id: str
    before: int | None
    after: int | None
    rules: Annotated[tuple[str, ...], Meta(description="Rules that moved it, or moved other items past it")] = ()


class MixedItem(Answer, frozen=True):
    """An item's mixed score and the part of each source; the parts sum to the score."""

    item_id: str
    score: float
    by_source: Annotated[Mapping[str, float], Meta(description="`model` is the tier's model")]


class WishedItem(Answer, frozen=True):
    """One item's position (from 1) by the tiers without the wish and with it; null if the item was not in that list."""

    item_id: str
    before: int | None
    after: int | None


class ExplanationRecord(Answer, frozen=True, kw_only=True):
    """How a request was answered; fields that a rejected request lacks are null or empty.

    `planned_tier` and `planned_reason` are the first decision, by `facts` (services.router.policy.Facts); `tier` and
    `reason` are how it ended.
    """

    request_id: str
    door: Annotated[str, Meta(examples=["rest"])]
    outcome: Annotated[str, Meta(description='"ok", or the error\'s code')]
    at_unix_ms: int
    message: Annotated[str | None, Meta(description="The error that the caller received")] = None
    trace_id: str | None = None
    user_id: str | None = None
    caller: str | None = None
    priority: str | None = None
    tier: str | None = None
    reason: str | None = None
    planned_tier: Annotated[str | None, Meta(description="The first decision, before anything was ranked")] = None
    planned_reason: str | None = None
    bundle_version: str | None = None
    k: int | None = None
    num_items: int | None = None
    deadline_ms: int | None = None
    elapsed_ms: float | None = None
    feature_age_ms: int | None = None
    list_state: Annotated[str | None, Meta(description="Whether the user's stored list was usable")] = None
    surface: str | None = None
    variant: Annotated[str | None, Meta(description="Of each experiment: `fresher=fresh,layout=control`")] = None
    facts: Annotated[Mapping[str, bool | int | float], Meta(description="The policy's inputs")] = msgspec.field(
        default_factory=dict
    )
    llm: LlmPart | None = None
    stages: tuple[StageTime, ...] = ()
    ruled: Annotated[tuple[RuledItem, ...], Meta(description="The first items before and after the rules")] = ()
    mixed: Annotated[tuple[MixedItem, ...], Meta(description="The first items of a tier that mixes sources")] = ()
    understood: Annotated[Understood | None, Meta(description="The wish as it was understood")] = None
    wished: Annotated[
        tuple[WishedItem, ...],
        Meta(description="The items without and with the wish, among the items that it does not exclude"),
    ] = ()


class ExplanationAnswer(ExplanationRecord, frozen=True):
    """How a request was answered; fields that a rejected request lacks are null."""

    component: ClassVar = "ExplanationBody"

    sentences: Annotated[tuple[str, ...], Meta(description="The explanation in words")] = ()

    @classmethod
    def of(cls, explanation: ExplanationRecord, sentences: Sequence[str]) -> "ExplanationAnswer":
        return cls(**msgspec.structs.asdict(explanation), sentences=tuple(sentences))


def encode_explanation(
    own: Sequence[Any],
    facts: Sequence[Any],
    llm: Sequence[Any] | None,
    stages: Sequence[Any],
    ruled: Sequence[Any] = (),
    mixed: Sequence[Any] = (),
    wish: tuple[Any, Sequence[Any]] | None = None,
) -> bytes:
    """Return the stored form: one JSON array of values without names, since many are written and few are read.

    Args:
        own: In the order of OWN_FIELDS.
        facts: In the order of the reader's fact names.
        llm: In the order of LlmPart's fields, if a request was sent to the LLM.
        stages: Tuples (name, offset in s, duration in s).
        ruled: Tuples (item id, position before, position after, names of rules).
        mixed: Tuples (item id, score, score by source).
        wish: The fields of `Understood` in order, and tuples (item id, position before, position after).
    """
    return to_json((own, facts, llm, stages, ruled, mixed, wish))


def decode_explanation(stored: bytes, fact_names: Sequence[str]) -> ExplanationRecord:
    """Read the stored form. Raises ValueError or TypeError for anything else."""
    own, facts, llm, stages, ruled, mixed, wish = from_json(stored)
    understood, wished = wish or (None, ())
    return ExplanationRecord(
        **dict(zip(OWN_FIELDS, own, strict=True)),
        facts=dict(zip(fact_names, facts, strict=True)) if facts else {},
        llm=None
        if llm is None
        else LlmPart(**{name: _rounded(value) for name, value in zip(_LLM_FIELDS, llm, strict=True)}),
        stages=tuple(_stage(*stage) for stage in sorted(stages, key=lambda stage: float(stage[1]))),
        ruled=tuple(
            RuledItem(item_id=item_id, before=before, after=after, rules=tuple(rules))
            for item_id, before, after, rules in ruled
        ),
        mixed=tuple(
            MixedItem(item_id=item_id, score=score, by_source=dict(by_source)) for item_id, score, by_source in mixed
        ),
        understood=None if understood is None else _understood(understood),
        wished=tuple(WishedItem(item_id=item_id, before=before, after=after) for item_id, before, after in wished),
    )


def whose(stored: bytes) -> tuple[str | None, int]:
    """Return the user of a stored explanation, if any, and its answer time (Unix ms); (None, 0) for anything else."""
    try:
        own = from_json(stored)[0]
        user_id, at_ms = own[_USER_ID], own[_AT]
    except (ValueError, LookupError, TypeError):
        return None, 0
    return (user_id, at_ms) if isinstance(user_id, str) and isinstance(at_ms, int) else (None, 0)


def _understood(fields: Sequence[Any]) -> Understood:
    must, must_not, liked, reader, relaxed = fields
    return Understood(
        must=tuple(must), must_not=tuple(must_not), liked=tuple(liked), reader=reader, relaxed=tuple(relaxed)
    )


def _stage(name: str, offset_s: float, duration_s: float) -> StageTime:
    return StageTime(name=name, offset_ms=round(offset_s * 1e3, 3), duration_ms=round(duration_s * 1e3, 3))


def _rounded(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


OWN_FIELDS = tuple(
    name
    for name in ExplanationRecord.__struct_fields__
    if name not in {"facts", "llm", "stages", "ruled", "mixed", "understood", "wished"}
)
_USER_ID, _AT = OWN_FIELDS.index("user_id"), OWN_FIELDS.index("at_unix_ms")
_LLM_FIELDS = LlmPart.__struct_fields__
