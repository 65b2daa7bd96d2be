"""The gRPC door's messages, to and from the contracts' types. Strict: unknown fields are rejected by number.

Parses bytes, so that malformed messages are rejected with a field and a fix. Knows protobuf, not gRPC.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from google.protobuf import json_format
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from services.contracts import recommend_pb2 as pb
from services.contracts.assignment import Assigned, AssignRequest
from services.contracts.batch import BatchAnswer, BatchEntry, check_batch_size, check_entry_deadline, entry_id
from services.contracts.erasure import STORE_MEANINGS, ErasureReceipt
from services.contracts.filters import BRANCHES, Expression, parse_expression
from services.contracts.recommend import (
    Filters,
    PopularIn,
    Recommendation,
    RecommendRequest,
    SimilarTo,
    check_id,
    seconds_of,
)
from services.contracts.rules import NO_RULES, parse_rules
from services.errors import InvalidRequest, RequestTooLarge
from services.gateway.events.record import Draft, check_num_events

M = TypeVar("M", bound=Message)

_MAX_UNKNOWN_BYTES = 10_000
"""protobuf lists all unknown fields to return the first, which took 0.2 s of the event loop for a body full of unknown
fields."""
_USE_THE_SCHEMA = "use the schema that reflection or recommend.proto gives"


def parse_recommend(body: bytes, max_bytes: int, request_id: str, deadline_ms: int | None) -> RecommendRequest:
    """Read a request; the message's own request id and deadline win. Raises InvalidRequest or RequestTooLarge."""
    message = parse_strictly(pb.RecommendRequest, body, max_bytes)
    return _request(message, request_id, deadline_ms)


def parse_similar(body: bytes, max_bytes: int, request_id: str, deadline_ms: int | None) -> RecommendRequest:
    """Read a request for similar items. Raises InvalidRequest or RequestTooLarge."""
    message = parse_strictly(pb.SimilarItemsRequest, body, max_bytes)
    return _request(message.request, request_id, deadline_ms, SimilarTo(tuple(message.item_ids)))


def parse_popular(body: bytes, max_bytes: int, request_id: str, deadline_ms: int | None) -> RecommendRequest:
    """Read a request for popular items. Raises InvalidRequest or RequestTooLarge."""
    message = parse_strictly(pb.PopularRequest, body, max_bytes)
    return _request(message.request, request_id, deadline_ms, PopularIn(message.window or None))


def parse_assign(body: bytes, max_bytes: int) -> AssignRequest:
    """Read an assignment request. Raises InvalidRequest or RequestTooLarge."""
    message = parse_strictly(pb.AssignRequest, body, max_bytes)
    return AssignRequest(user_id=message.user_id or None, session_id=message.session_id or None)


def parse_batch(body: bytes, max_bytes: int, call_id: str, deadline_ms: int | None) -> list[BatchEntry]:
    """Read the requests of a batch; an invalid entry is refused individually.

    Raises InvalidRequest if the batch as a whole is invalid, or RequestTooLarge.
    """
    message = _parse(pb.RecommendBatchRequest, body, max_bytes)
    check_batch_size(len(message.requests), None)
    deadline_ms = message.deadline_ms if message.HasField("deadline_ms") else deadline_ms
    entries = [_entry(one, entry_id(call_id, place), deadline_ms) for place, one in enumerate(message.requests)]
    del message.requests[:]
    _refuse_unknown(message)
    return entries


def _entry(message: pb.RecommendRequest, request_id: str, deadline_ms: int | None) -> BatchEntry:
    request_id = _valid_id(message.request_id) or request_id
    try:
        _refuse_unknown(message)
        check_entry_deadline(message.deadline_ms if message.HasField("deadline_ms") else None)
        return BatchEntry(request_id, _request(message, request_id, deadline_ms))
    except InvalidRequest as error:
        return BatchEntry(request_id, error)


def _request(
    message: pb.RecommendRequest,
    request_id: str,
    deadline_ms: int | None,
    subject: SimilarTo | PopularIn | None = None,
) -> RecommendRequest:
    return RecommendRequest(
        request_id=message.request_id or request_id,
        user_id=message.user_id or None,
        session_id=message.session_id or None,
        k=message.k if message.HasField("k") else None,
        recent_item_ids=tuple(message.recent_item_ids),
        exclude_item_ids=tuple(message.exclude_item_ids),
        exclude_seen=message.exclude_seen if message.HasField("exclude_seen") else None,
        filters=Filters(
            categories=tuple(message.filters.categories) or None,
            allowed_item_ids=tuple(message.filters.allowed_item_ids) or None,
            expression=_expression(message.filters),
        ),
        deadline_ms=message.deadline_ms if message.HasField("deadline_ms") else deadline_ms,
        rationale=message.rationale,
        surface=message.surface or None,
        rules=parse_rules(_plain(message.rules, "rules"), "rules") if message.HasField("rules") else NO_RULES,
        next=message.next or None,
        avoid_shown_s=seconds_of("avoid_shown.within", message.avoid_shown.within)
        if message.HasField("avoid_shown")
        else None,
        subject=subject,
    )


def request_id_of(body: bytes, kind: type[Message] = pb.RecommendRequest) -> str | None:
    """Return the request id of a rejected message of this kind, if it can be read and is valid."""
    message: Any = kind()
    with suppress(DecodeError):
        message.ParseFromString(body)
        return _valid_id(message.request_id if kind is pb.RecommendRequest else message.request.request_id)
    return None


def _valid_id(request_id: str) -> str | None:
    with suppress(InvalidRequest):
        check_id("request_id", request_id)
        return request_id
    return None


def parse_events(body: bytes, max_bytes: int, max_events: int) -> list[Draft]:
    """Read events; their fields are checked later, their number at once: a body has room for half a million empty ones.

    Raises InvalidRequest or RequestTooLarge.
    """
    message = _parse(pb.RecordEventsRequest, body, max_bytes)
    check_num_events(len(message.events), max_events)
    _refuse_unknown(message)
    return [_draft(event) for event in message.events]


def format_recommendation(answer: Recommendation) -> pb.RecommendResponse:
    """Return an answer as a message."""
    rationale = answer.rationale
    return pb.RecommendResponse(
        request_id=answer.request_id,
        items=[
            pb.ScoredItem(item_id=item.item_id, score=item.score, title=item.title, source=item.source)
            for item in answer.items
        ],
        tier=answer.tier,
        reason=answer.reason,
        bundle_version=answer.bundle_version,
        newest_event_time_ms=answer.newest_event_time_ms,
        feature_age_ms=answer.feature_age_ms,
        deadline_ms=answer.deadline_ms,
        stages_ms=answer.stages_ms,
        next=answer.next,
        rationale=None if rationale is None else rationale.sentence,
        rationale_reason=None if rationale is None else rationale.outcome,
    )


def _expression(filters: pb.Filters) -> Expression | None:
    if not (filters.must or filters.should or filters.must_not):
        return None
    plain = _plain(filters, "filters")
    return parse_expression({name: plain[name] for name in BRANCHES if name in plain}, "filters")


def _plain(message: Message, path: str) -> dict[str, Any]:
    """Return a message as the plain values of its JSON form, which the contract validates for all doors.

    Raises InvalidRequest.
    """
    try:
        return json_format.MessageToDict(message, preserving_proto_field_name=True)
    except (json_format.Error, ValueError) as error:
        raise InvalidRequest(
            path, f"a value without a JSON form ({error})", "send finite numbers, texts and flags"
        ) from error


def format_assigned(assigned: Assigned) -> pb.AssignResponse:
    """Return an assignment as a message."""
    return pb.AssignResponse(
        surfaces=[
            pb.SurfaceAssignment(
                surface=one.surface or "",
                name=one.name,
                bundle_version=one.bundle_version,
                is_canary=one.is_canary,
                variants=one.variants,
            )
            for one in assigned.surfaces
        ]
    )


def format_batch(answers: Sequence[BatchAnswer]) -> pb.RecommendBatchResponse:
    """Return the answers as a message."""
    return pb.RecommendBatchResponse(answers=[_outcome(one) for one in answers])


def _outcome(answer: BatchAnswer) -> pb.BatchAnswer:
    if isinstance(answer.outcome, Recommendation):
        return pb.BatchAnswer(recommendation=format_recommendation(answer.outcome))
    error = answer.outcome
    return pb.BatchAnswer(
        error=pb.Error(
            code=error.kind.value,
            message=error.problem,
            field=error.field,
            fix=error.fix,
            request_id=answer.request_id,
        )
    )


def parse_strictly(kind: type[M], body: bytes, max_bytes: int) -> M:
    """Read a message without unknown fields. Raises InvalidRequest or RequestTooLarge."""
    message = _parse(kind, body, max_bytes)
    _refuse_unknown(message)
    return message


def format_receipt(receipt: ErasureReceipt) -> pb.ErasureReceipt:
    """Return a receipt as a message."""
    return pb.ErasureReceipt(
        erasure_id=receipt.erasure_id,
        accepted_time_ms=receipt.accepted_time_ms,
        is_done_online=receipt.is_done_online,
        is_done=receipt.is_done,
        stores=[
            pb.ErasedStore(store=store, meaning=STORE_MEANINGS[store], done_time_ms=done)
            for store, done in receipt.stores.items()
        ],
        remaining=[
            pb.Remaining(what=one.what, until=one.until, until_unix_ms=one.until_unix_ms) for one in receipt.remaining
        ],
    )


def _draft(event: pb.Interaction) -> Draft:
    """Return the fields that were set; proto3 cannot distinguish an empty string from an absent one."""
    fields: dict[str, Any] = {field.name: value for field, value in event.ListFields()}
    return fields


def _parse(kind: type[M], body: bytes, max_bytes: int) -> M:
    if len(body) > max_bytes:
        raise RequestTooLarge(max_bytes)
    message = kind()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise InvalidRequest("body", f"not a {kind.DESCRIPTOR.name} message", "send the schema's message") from error
    return message


def _refuse_unknown(message: Message) -> None:
    """Reject a message with unknown fields.

    Raises InvalidRequest naming the first, or the body if there are too many to list.
    """
    known = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()
    num_bytes = message.ByteSize() - known.ByteSize()
    if num_bytes > _MAX_UNKNOWN_BYTES:
        raise InvalidRequest("body", f"{num_bytes} bytes of unknown fields", _USE_THE_SCHEMA)
    if not num_bytes:
        return
    for place in _unknown_fields(message, ""):
        raise InvalidRequest(place, "unknown", _USE_THE_SCHEMA)


def _unknown_fields(message: Message, path: str) -> Iterator[str]:
    """Yield the paths of unknown fields, by number: `filters.#7`."""
    unknown = UnknownFieldSet(message)
    for place in range(len(unknown)):
        yield f"{path}#{unknown[place].field_number}"
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if isinstance(value, Message):
            yield from _unknown_fields(value, f"{path}{field.name}.")
            continue
        if field.message_type.GetOptions().map_entry:
            parts = [(key, part) for key, part in value.items() if isinstance(part, Message)]
        else:
            parts = [*enumerate(value)]
        for key, part in parts:
            yield from _unknown_fields(part, f"{path}{field.name}[{key!r}].")
