"""The REST door's JSON, parsed and written.

Strict: unknown fields and wrong types are rejected by name, without conversions ("5" is not a number). The
contracts check the values.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, RootModel, SkipValidation, ValidationError
from pydantic.config import JsonDict
from pydantic.json_schema import SkipJsonSchema

from services.contracts.batch import (
    MAX_BATCH,
    BatchAnswer,
    BatchEntry,
    check_batch_size,
    check_entry_deadline,
    entry_id,
)
from services.contracts.events import MAX_EVENT_AGE_MS, MAX_EVENT_LEAD_MS, REMEMBERED_EVENTS
from services.contracts.filters import BRANCHES, MAX_CONDITIONS, TESTS, parse_expression
from services.contracts.recommend import (
    DEFAULT_K,
    MAX_DEADLINE_MS,
    MAX_ID_CHARS,
    MAX_IDS_PER_FIELD,
    MAX_K,
    MAX_NEXT_CHARS,
    MAX_SIMILAR_TO,
    PERIOD,
    Filters,
    PopularIn,
    Reason,
    Recommendation,
    RecommendRequest,
    SimilarTo,
    Tier,
    check_id,
    seconds_of,
)
from services.contracts.rules import (
    MAX_BLOCKS,
    MAX_BOOSTS,
    MAX_CAPS,
    MAX_FACTOR,
    MAX_PINS,
    MIN_FACTOR,
    NO_RULES,
    parse_rules,
)
from services.errors import InvalidRequest, TailraceError
from services.gateway.call.http import field_path
from services.gateway.call.operation import PRINTABLE
from services.gateway.events.record import Draft
from services.gateway.records.reasons import REASONS, TIERS, ReasonText, TierText

_OF_TYPE = re.compile(r"Input should be an? (?:valid )?(\w+)")
"""Pydantic's message for a value of a wrong type."""
_MAX_DIGITS = 9
_POPULAR_PARAMETERS = ("window", "category", "k", "session_id")
_MAX_NUM_FAULTS = 100
"""Pydantic formats every error to return the first, which took 0.3 s of the event loop for a body full of unknown
fields."""


ID_SCHEMA: JsonDict = {"minLength": 1, "maxLength": MAX_ID_CHARS, "pattern": PRINTABLE}
_IDS_SCHEMA: JsonDict = {"maxItems": MAX_IDS_PER_FIELD}
_AT_LEAST_ONE_SCHEMA: JsonDict = {"minItems": 1, "maxItems": MAX_IDS_PER_FIELD}

Id = Annotated[str, Field(json_schema_extra=ID_SCHEMA)]
"""The limits here and below are for the OpenAPI document; the contracts enforce them for all doors."""


def _lines(texts: Mapping[Tier, TierText] | Mapping[Reason, ReasonText]) -> str:
    return "".join(f"\n- `{name}`: {text.meaning}" for name, text in texts.items())


B = TypeVar("B", bound=BaseModel)


class Body(BaseModel):
    """A body that rejects unknown fields and wrong types."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class RangeBody(Body):
    """Bounds of a number, at least one."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})

    gte: float | SkipJsonSchema[None] = Field(None, description="At least")
    gt: float | SkipJsonSchema[None] = Field(None, description="More than, in place of gte")
    lte: float | SkipJsonSchema[None] = Field(None, description="At most")
    lt: float | SkipJsonSchema[None] = Field(None, description="Less than, in place of lte")


class ConditionBody(Body):
    """One test of one attribute: exactly one of `eq`, `in`, `range` and `exists`."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": [test]} for test in TESTS]})

    key: Id = Field(description="The attribute's name, or `item_id`", examples=["categories"])
    eq: Id | float | bool | SkipJsonSchema[None] = Field(None, description="Equal to this", examples=["Comedy"])
    in_: list[Id | float | bool] | SkipJsonSchema[None] = Field(
        None, alias="in", description="Equal to one of these", min_length=1
    )
    range: RangeBody | SkipJsonSchema[None] = Field(None, description="A number within bounds")
    exists: bool | SkipJsonSchema[None] = Field(None, description="Whether the item has the attribute at all")


_Clauses = Annotated[
    list["ConditionBody | ExpressionBody"], SkipValidation, Field(json_schema_extra={"maxItems": MAX_CONDITIONS})
]
"""The contract validates these for all doors; the types are for the OpenAPI document."""


class ExpressionBody(Body):
    """Clauses in the place of one condition."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})

    must: _Clauses | SkipJsonSchema[None] = Field(None, description="All of these hold")
    should: _Clauses | SkipJsonSchema[None] = Field(None, description="At least one of these holds")
    must_not: _Clauses | SkipJsonSchema[None] = Field(None, description="None of these holds")


class FiltersBody(Body):
    """Which items may be shown."""

    categories: Annotated[list[Id], Field(fail_fast=True, json_schema_extra=_AT_LEAST_ONE_SCHEMA)] | None = Field(
        None, description="Items of any of these; each must be in the catalogue", examples=[["Comedy"]]
    )
    allowed_item_ids: Annotated[list[Id], Field(fail_fast=True, json_schema_extra=_AT_LEAST_ONE_SCHEMA)] | None = Field(
        None, description="Only these items; each must be in the catalogue"
    )
    must: _Clauses | None = Field(
        None, description="All of these hold", examples=[[{"key": "categories", "eq": "Comedy"}]]
    )
    should: _Clauses | None = Field(None, description="At least one of these holds, if there are any")
    must_not: _Clauses | None = Field(None, description="None of these holds")


class BoostBody(Body):
    """Items that count as more likely, or below 1 as less."""

    where: ConditionBody | ExpressionBody
    factor: float = Field(json_schema_extra={"minimum": MIN_FACTOR, "maximum": MAX_FACTOR})


class PinBody(Body):
    """An item and its place."""

    item_id: Id
    position: int = Field(description="From 1", json_schema_extra={"minimum": 1, "maximum": MAX_K})


class CapBody(Body):
    """At most so many items of each value of an attribute."""

    attribute: Id = Field(examples=["categories"])
    most: int = Field(json_schema_extra={"minimum": 1, "maximum": MAX_K})


class FreshnessBody(Body):
    """An item published now counts as `factor` times as likely; what exceeds 1 halves every `half_life_h` hours."""

    half_life_h: float = Field(json_schema_extra={"minimum": 0.01, "maximum": 100_000})
    factor: float = Field(json_schema_extra={"minimum": 1, "maximum": MAX_FACTOR})


class RulesBody(Body):
    """How the ranking is reordered; each comes in the place of the surface's, but blocks add up."""

    boosts: list[BoostBody] | None = Field(None, json_schema_extra={"maxItems": MAX_BOOSTS})
    pins: list[PinBody] | None = Field(None, json_schema_extra={"maxItems": MAX_PINS})
    blocks: list[ConditionBody | ExpressionBody] | None = Field(
        None, description="Items for which any of these holds are not shown", json_schema_extra={"maxItems": MAX_BLOCKS}
    )
    caps: list[CapBody] | None = Field(None, json_schema_extra={"maxItems": MAX_CAPS})
    diversity: float | None = Field(
        None,
        description="The weight of unlikeness in maximal marginal relevance",
        json_schema_extra={"minimum": 0, "maximum": 1},
    )
    decay: float | None = Field(
        None,
        description="How likely an item counts after each time that it was shown and not clicked",
        json_schema_extra={"minimum": MIN_FACTOR, "maximum": 1},
    )
    freshness: FreshnessBody | None = Field(None)


class AvoidShownBody(Body):
    """What was shown a short while ago, and is left out."""

    within: str = Field(
        description="A period of at most 30d", examples=["1h"], json_schema_extra={"pattern": f"^({PERIOD})$"}
    )


class RecommendBody(Body):
    """The user, the number of items and the deadline."""

    model_config = ConfigDict(
        json_schema_extra={
            "if": {"required": ["user_id"], "properties": {"user_id": {"type": "string"}}},
            "else": {"required": ["recent_item_ids"], "properties": {"recent_item_ids": {"minItems": 1}}},
        }
    )

    user_id: Id | None = Field(
        None, description="Absent for an anonymous visitor, who needs recent_item_ids", examples=["196"]
    )
    session_id: Id | None = Field(
        None,
        description="Of a visitor: experiments and canaries keep to it; a user_id goes before it",
        examples=["7f3a9c"],
    )
    surface: Id | None = Field(
        None,
        description="The place in the product, of those that the operator set up, whose k, deadline, filter and rules apply",
    )
    k: Annotated[int, Field(json_schema_extra={"minimum": 1, "maximum": MAX_K})] | None = Field(
        None, description=f"How many items; absent: the surface's, or {DEFAULT_K}", examples=[10]
    )
    recent_item_ids: list[Id] = Field(
        [],
        fail_fast=True,
        description="Oldest first; what the store cannot know yet. Items that the catalogue lacks have no effect",
        json_schema_extra=_IDS_SCHEMA,
    )
    exclude_item_ids: list[Id] = Field(
        [],
        fail_fast=True,
        description="Never show these; ids that the catalogue lacks have no effect",
        json_schema_extra=_IDS_SCHEMA,
    )
    exclude_seen: bool | None = Field(
        None,
        description="Leave out what the user has seen; absent: unless the live bundle learned that users come back to items",
    )
    filters: FiltersBody | None = None
    rules: Annotated[RulesBody, SkipValidation] | None = Field(None, description="How the ranking is reordered")
    deadline_ms: Annotated[int, Field(json_schema_extra={"minimum": 1, "maximum": MAX_DEADLINE_MS})] | None = Field(
        None,
        description="From arrival; or header X-Deadline-Ms. The server limits it, and has a default; what is not ready in time is left out",
        examples=[200],
    )
    request_id: Id | None = Field(None, description="Or header X-Request-Id; one is made when absent")
    next: str | None = Field(
        None,
        description="Of this user's last answer: get items that it and those before it did not hold",
        json_schema_extra={"minLength": 1, "maxLength": MAX_NEXT_CHARS},
    )
    avoid_shown: AvoidShownBody | None = Field(
        None, description="Leave out what the user was shown lately; the newest 200 items are remembered"
    )
    rationale: bool = Field(
        False, description="Add one sentence on why these items, if it can be written before the deadline"
    )


class BatchBody(Body):
    """Requests for several users; each is answered, or refused, as if it came alone."""

    requests: list[RecommendBody] = Field(
        description="Each without deadline_ms", json_schema_extra={"minItems": 1, "maxItems": MAX_BATCH}
    )
    deadline_ms: Annotated[int, Field(json_schema_extra={"minimum": 1, "maximum": MAX_DEADLINE_MS})] | None = Field(
        None, description="For all of them together, from arrival; or header X-Deadline-Ms", examples=[1_000]
    )


class SimilarBody(RecommendBody):
    """For whom the similar items are, if for anybody, and which of them may be shown. All fields are optional."""

    model_config = ConfigDict(json_schema_extra={})

    item_ids: list[Id] = Field(
        [],
        fail_fast=True,
        description="Further items beside the one of the path, such as those of a cart",
        json_schema_extra={"maxItems": MAX_SIMILAR_TO - 1},
    )


class EventBody(Body):
    """One thing that a user did with an item."""

    user_id: Id = Field(examples=["196"])
    item_id: Id = Field(examples=["242"])
    event_type: Id = Field("click", examples=["click"])
    event_time_ms: int | None = Field(
        None,
        description=f"Unix milliseconds, at most {MAX_EVENT_AGE_MS // 86_400_000} days ago and {MAX_EVENT_LEAD_MS // 1_000} s ahead; absent: now",
    )
    value: float = 1.0
    event_id: Id | None = Field(
        None,
        description=f"Send one to make a repeat harmless: it is recognised among the {REMEMBERED_EVENTS} of its user seen last",
    )
    request_id: Id | None = Field(None, description="The answer that the user acted on")


class EventListBody(RootModel[Annotated[list[EventBody], Field(json_schema_extra={"minItems": 1})]]):
    """Many events as a list."""


class EventsBody(Body):
    """Many events."""

    events: list[EventBody] = Field(json_schema_extra={"minItems": 1})


class ItemBody(Body):
    """One recommended item; `source` is the tier that chose it."""

    item_id: str
    score: float = Field(description="Comparable within one answer only")
    title: str
    source: str = Field(description="The tier that chose the item", examples=["llm"])


class RecommendationBody(Body):
    """The items, and how they were made."""

    request_id: str = Field(description="Send it with the events that follow from this answer")
    items: list[ItemBody] = Field(description="Best first; fewer than k when the filters leave fewer")
    tier: str = Field(
        description="The tier that answered; the next ones fill a list that it cannot fill" + _lines(TIERS),
        examples=["llm"],
    )
    reason: str = Field(description="Why that tier answered" + _lines(REASONS), examples=["llm_in_time"])
    bundle_version: str = Field(description="The bundle that answered")
    newest_event_time_ms: int | None = Field(
        description="Unix milliseconds of the newest event of this user that the answer is based on; null: none"
    )
    feature_age_ms: int | None = Field(description="That event's age when the answer was sent")
    deadline_ms: int = Field(description="The deadline that applied")
    stages_ms: dict[str, float] = Field(description="Milliseconds by stage")
    rationale: str | None = Field(
        None, description="One sentence on why these items; absent when none was requested or written"
    )
    next: str | None = Field(
        None, description="Send it as `next` for the items that follow, within an hour; absent: the list ends here"
    )
    rationale_reason: str | None = Field(
        None, description="written, or why not: late, busy, failed, no_text; absent when none was requested"
    )


class BatchAnswersBody(Body):
    """The answers, in the order of the requests."""

    answers: list["RecommendationBody | ErrorBody"] = Field(
        description="Each a recommendation, or the error that this request alone would have got"
    )


class CanaryBody(Body):
    """A release under way."""

    version: str
    share: float = Field(description="Of the users, who get this version now")


class BundleBody(Body):
    """The live bundle of a name."""

    name: str
    version: str
    num_items: int = Field(description="In its catalogue")
    code_depth: int = Field(description="Codes per item")
    manifest: dict[str, Any] = Field(description="How it was made, and how it was evaluated")
    canary: CanaryBody | None = Field(description="The release under way beside it; null: none is, or not loaded yet")


class StatusBody(Body):
    """A probe's answer."""

    status: str = Field(examples=["ok"])


class StageTimeBody(Body):
    """One stage; stages may overlap."""

    name: str = Field(examples=["features"])
    offset_ms: float = Field(description="From the request's arrival to its beginning")
    duration_ms: float


class LlmPartBody(Body):
    """How the LLM call ended; counts and times only when it answered in time."""

    outcome: str = Field(examples=["in_time"])
    num_prompt_tokens: int | None
    num_cached_tokens: int | None
    num_steps: int | None
    queue_ms: float | None
    compute_ms: float | None
    decode_ms: float | None


class RuledItemBody(Body):
    """An item's place before the rules and after them, from 1; null: it was or is not there."""

    item_id: str
    before: int | None
    after: int | None
    rules: list[str] = Field(description="Those that moved it, or others past it")


class MixedItemBody(Body):
    """An item's mixed score and the part of each source; the parts sum to the score."""

    item_id: str
    score: float
    by_source: dict[str, float] = Field(description="`model` is the model of the tier")


class ExplanationBody(Body):
    """How a request was answered; fields that a refusal does not have are null."""

    request_id: str
    door: str = Field(examples=["rest"])
    outcome: str = Field(description='"ok", or the error\'s code')
    at_unix_ms: int
    message: str | None = Field(description="The error that a refused caller received")
    trace_id: str | None
    user_id: str | None
    caller: str | None
    priority: str | None
    tier: str | None
    reason: str | None
    planned_tier: str | None = Field(description="The first decision, before anything was ranked")
    planned_reason: str | None
    bundle_version: str | None
    k: int | None
    num_items: int | None
    deadline_ms: int | None
    elapsed_ms: float | None
    feature_age_ms: int | None
    list_state: str | None = Field(description="Whether the user's stored list was usable")
    surface: str | None
    variant: str | None = Field(description="Of each experiment: `fresher=fresh,layout=control`")
    facts: dict[str, bool | int | float] = Field(description="The policy's inputs")
    llm: LlmPartBody | None
    stages: list[StageTimeBody]
    ruled: list[RuledItemBody] = Field(description="The first items before and after the rules")
    mixed: list[MixedItemBody] = Field(description="The first items of a tier that mixes sources")
    sentences: list[str] = Field(description="The explanation in words")


class RecordedBody(Body):
    """How many events the broker acknowledged, an id that was sent several times counted once, and all ids in the order sent."""

    accepted: int
    event_ids: list[str]
    unknown_items: list[str] = Field(
        description="Items of these events that the live catalogue lacks, each once; their events are recorded all the same"
    )


class ErrorDetail(Body):
    """One error; `field` and `fix` when the caller can correct it."""

    code: str = Field(examples=["invalid_request"])
    message: str
    field: str | None
    fix: str | None
    request_id: str


class ErrorBody(Body):
    """The body of every error."""

    error: ErrorDetail


def parse_recommend(body: bytes, request_id: str, deadline_ms: int | None) -> RecommendRequest:
    """Read a request; the body's own request id and deadline win. Raises InvalidRequest naming the field."""
    return _request(_validated(RecommendBody, body), request_id, deadline_ms)


def parse_similar(body: bytes, item_id: str, request_id: str, deadline_ms: int | None) -> RecommendRequest:
    """Read a request for items similar to this item and to the items in the body, which may be empty.

    Raises InvalidRequest naming the field.
    """
    sent = _validated(SimilarBody, body or b"{}")
    return _request(sent, request_id, deadline_ms, SimilarTo((item_id, *sent.item_ids)))


def parse_popular(query: Iterable[tuple[str, str]], request_id: str, deadline_ms: int | None) -> RecommendRequest:
    """Read the query of a request for popular items. Raises InvalidRequest naming the parameter."""
    sent = parse_query(query, _POPULAR_PARAMETERS)
    k = sent.get("k", "10")
    if not (k.isascii() and k.isdigit() and len(k) <= _MAX_DIGITS):
        raise InvalidRequest("k", "not a whole number", f"send 1 to {MAX_K}")
    return RecommendRequest(
        request_id=request_id,
        session_id=sent.get("session_id"),
        k=int(k),
        filters=Filters(categories=(sent["category"],) if "category" in sent else None),
        deadline_ms=deadline_ms,
        subject=PopularIn(sent.get("window")),
    )


def parse_query(query: Iterable[tuple[str, str]], parameters: Sequence[str]) -> dict[str, str]:
    """Read a query's parameters, each at most once. Raises InvalidRequest naming the parameter."""
    sent: dict[str, str] = {}
    for name, value in query:
        if name not in parameters:
            raise InvalidRequest(name, "unknown", f"the parameters are {', '.join(parameters)}")
        if name in sent:
            raise InvalidRequest(name, "sent twice", "send it once")
        sent[name] = value
    return sent


def parse_batch(body: bytes, call_id: str, deadline_ms: int | None) -> list[BatchEntry]:
    """Read the requests of a batch; an unreadable entry is refused individually.

    Raises InvalidRequest if the batch as a whole is invalid.
    """
    try:
        sent = pydantic_core.from_json(body)
    except ValueError as error:
        raise InvalidRequest("body", f"not JSON: {error}", "send one JSON object") from error
    if not isinstance(sent, dict) or not isinstance(sent.get("requests"), list):
        raise InvalidRequest("requests", "not a list", 'send {"requests": [...]}')
    for name in sent.keys() - BatchBody.model_fields.keys():
        raise InvalidRequest(name, "unknown", f"the fields are {', '.join(sorted(BatchBody.model_fields))}")
    check_batch_size(len(sent["requests"]), None)
    whole = _validated(BatchBody, {**sent, "requests": []})
    deadline_ms = deadline_ms if whole.deadline_ms is None else whole.deadline_ms
    return [_entry(one, entry_id(call_id, place), deadline_ms) for place, one in enumerate(sent["requests"])]


def _entry(sent: Any, request_id: str, deadline_ms: int | None) -> BatchEntry:
    if isinstance(sent, dict):
        request_id = _valid_id(sent.get("request_id")) or request_id
    try:
        body = _validated(RecommendBody, sent)
        check_entry_deadline(body.deadline_ms)
        return BatchEntry(request_id, _request(body, request_id, deadline_ms))
    except InvalidRequest as error:
        return BatchEntry(request_id, error)


def _request(
    sent: RecommendBody, request_id: str, deadline_ms: int | None, subject: SimilarTo | None = None
) -> RecommendRequest:
    filters = sent.filters or FiltersBody()
    return RecommendRequest(
        request_id=request_id if sent.request_id is None else sent.request_id,
        user_id=sent.user_id,
        session_id=sent.session_id,
        k=sent.k,
        recent_item_ids=tuple(sent.recent_item_ids),
        exclude_item_ids=tuple(sent.exclude_item_ids),
        exclude_seen=sent.exclude_seen,
        filters=Filters(
            categories=None if filters.categories is None else tuple(filters.categories),
            allowed_item_ids=None if filters.allowed_item_ids is None else tuple(filters.allowed_item_ids),
            expression=parse_expression({name: getattr(filters, name) for name in BRANCHES}, "filters"),
        ),
        deadline_ms=deadline_ms if sent.deadline_ms is None else sent.deadline_ms,
        rationale=sent.rationale,
        surface=sent.surface,
        rules=NO_RULES if sent.rules is None else parse_rules(sent.rules, "rules"),
        next=sent.next,
        avoid_shown_s=None if sent.avoid_shown is None else seconds_of("avoid_shown.within", sent.avoid_shown.within),
        subject=subject,
    )


def _validated(model: type[B], sent: Any) -> B:
    """Validate JSON text, or values parsed from it, by a model. Raises InvalidRequest naming the first wrong field."""
    try:
        return model.model_validate_json(sent) if isinstance(sent, bytes) else model.model_validate(sent)
    except ValidationError as error:
        raise _refusal(error, model) from error


def request_id_of(body: bytes) -> str | None:
    """Return the request id of a rejected body, if it can be read and is valid."""
    with suppress(ValueError):
        sent = pydantic_core.from_json(body, allow_partial=True)
        return _valid_id(sent.get("request_id")) if isinstance(sent, dict) else None
    return None


def _valid_id(request_id: Any) -> str | None:
    with suppress(InvalidRequest):
        if isinstance(request_id, str):
            check_id("request_id", request_id)
            return request_id
    return None


def parse_events(body: bytes) -> list[Draft]:
    """Read `{"events": [...]}`, a list, or one event; their fields are checked later. Raises InvalidRequest."""
    try:
        sent = pydantic_core.from_json(body)
    except ValueError as error:
        raise InvalidRequest("body", f"not JSON: {error}", "send one JSON object") from error
    if isinstance(sent, dict) and "events" in sent:
        for name in sent.keys() - {"events"}:
            raise InvalidRequest(name, "unknown", "send events alone")
        sent = sent["events"]
    drafts = [sent] if isinstance(sent, dict) else sent
    if not isinstance(drafts, list):
        raise InvalidRequest("events", "not a list", 'send {"events": [...]}')
    for place, draft in enumerate(drafts):
        if not isinstance(draft, dict):
            raise InvalidRequest(f"events[{place}]", "not an object", "send one JSON object per event")
    return drafts


def format_recommendation(answer: Recommendation) -> dict[str, Any]:
    """Return an answer as plain values, ready for JSON.

    Written by hand, since `asdict` copies deeply and costs ten times as much.
    """
    plain = {
        "request_id": answer.request_id,
        "items": [
            {"item_id": item.item_id, "score": item.score, "title": item.title, "source": item.source}
            for item in answer.items
        ],
        "tier": answer.tier,
        "reason": answer.reason,
        "bundle_version": answer.bundle_version,
        "newest_event_time_ms": answer.newest_event_time_ms,
        "feature_age_ms": answer.feature_age_ms,
        "deadline_ms": answer.deadline_ms,
        "stages_ms": dict(answer.stages_ms),
    }
    if answer.next is not None:
        plain["next"] = answer.next
    if answer.rationale is not None:
        plain["rationale_reason"] = answer.rationale.outcome
        if answer.rationale.sentence is not None:
            plain["rationale"] = answer.rationale.sentence
    return plain


_PARTS: Mapping[str, type[Body]] = {"filters": FiltersBody, "avoid_shown": AvoidShownBody}


def format_batch(answers: Sequence[BatchAnswer], error_body: Callable[[TailraceError, str], Any]) -> Iterator[Any]:
    """Yield each answer as plain values; `error_body` formats errors as for single requests."""
    for one in answers:
        if isinstance(one.outcome, Recommendation):
            yield format_recommendation(one.outcome)
        else:
            yield error_body(one.outcome, one.request_id)


def _refusal(error: ValidationError, model: type[BaseModel]) -> InvalidRequest:
    if error.error_count() > _MAX_NUM_FAULTS:  # unknown fields: no other error occurs so often
        fields = ", ".join(sorted(model.model_fields))
        return InvalidRequest("body", f"{error.error_count()} unknown or wrong fields", f"the fields are {fields}")
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field, kind, message = field_path(first["loc"]), first["type"], first["msg"]
    if kind == "json_invalid":
        return InvalidRequest("body", f"not JSON: {message.removeprefix('Invalid JSON: ')}", "send one JSON object")
    if not first["loc"]:
        return InvalidRequest("body", "not a JSON object", "send one JSON object")
    if kind == "extra_forbidden":
        part = next((str(one) for one in first["loc"][:-1] if one in _PARTS), None)
        model = model if part is None else _PARTS[part]
        return InvalidRequest(field, "unknown", f"the fields are {', '.join(sorted(model.model_fields))}")
    if named := _OF_TYPE.fullmatch(message):
        expected = f"{'an' if named[1][0] in 'aio' else 'a'} {named[1]}"
        return InvalidRequest(field, f"not {expected}", f"send {expected}")
    return InvalidRequest(field, "wrong type or value", message.replace("Input should be", "send"))
