"""The gRPC door's messages: requests to the contracts' messages, and answers to protobuf.

Parses bytes, so that malformed messages are rejected with a field and a fix. Knows protobuf, not gRPC.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from google.protobuf.message import DecodeError, Message

from services.contracts import recommend_pb2 as pb
from services.contracts.answers import ErrorDetail
from services.contracts.assignment import AssignRequest
from services.contracts.batch import BatchAnswer, BatchEntry, batch_deadline_ms, check_batch_size, entry_id, read_entry
from services.contracts.events import EventBody
from services.contracts.message import convert, valid_id
from services.contracts.protobuf import message_of, parse, parse_strictly, plain_of, refuse_unknown
from services.contracts.recommend import (
    PopularIn,
    Recommendation,
    RecommendBody,
    RecommendRequest,
    SearchFor,
    SimilarTo,
)
from services.gateway.events.record import check_num_events, read_events


def parse_recommend(body: bytes, max_bytes: int, request_id: str, deadline_ms: int | None) -> RecommendRequest:
    """Read a request; the message's own request id and deadline win. Raises InvalidRequest or RequestTooLarge."""
    message = parse_strictly(pb.RecommendRequest, body, max_bytes)
    return RecommendRequest.of(convert(RecommendBody, plain_of(message)), request_id, deadline_ms)


def parse_similar(body: bytes, max_bytes: int, request_id: str, deadline_ms: int | None) -> RecommendRequest:
    """Read a request for similar items. Raises InvalidRequest or RequestTooLarge."""
    sent = plain_of(parse_strictly(pb.SimilarItemsRequest, body, max_bytes))
    request = convert(RecommendBody, sent.pop("request", {}))
    return RecommendRequest.of(request, request_id, deadline_ms, convert(SimilarTo, sent))


def parse_popular(body: bytes, max_bytes: int, request_id: str, deadline_ms: int | None) -> RecommendRequest:
    """Read a request for popular items. Raises InvalidRequest or RequestTooLarge."""
    sent = plain_of(parse_strictly(pb.PopularRequest, body, max_bytes))
    request = sent.pop("request", {})
    subject = convert(PopularIn, sent)
    return RecommendRequest.of(convert(RecommendBody, request), request_id, deadline_ms, subject)


def parse_search(body: bytes, max_bytes: int, request_id: str, deadline_ms: int | None) -> RecommendRequest:
    """Read a search. Raises InvalidRequest or RequestTooLarge."""
    sent = plain_of(parse_strictly(pb.SearchRequest, body, max_bytes))
    request = sent.pop("request", {})
    subject = convert(SearchFor, sent)
    return RecommendRequest.of(convert(RecommendBody, request), request_id, deadline_ms, subject)


def parse_assign(body: bytes, max_bytes: int) -> AssignRequest:
    """Read an assignment request. Raises InvalidRequest or RequestTooLarge."""
    message = parse_strictly(pb.AssignRequest, body, max_bytes)
    return convert(AssignRequest, plain_of(message))


def parse_batch(body: bytes, max_bytes: int, call_id: str, deadline_ms: int | None) -> list[BatchEntry]:
    """Read the requests of a batch; an invalid entry is refused individually.

    Raises InvalidRequest if the batch as a whole is invalid, or RequestTooLarge.
    """
    message = parse(pb.RecommendBatchRequest, body, max_bytes)
    check_batch_size(len(message.requests), None)
    own = {"deadline_ms": message.deadline_ms} if message.HasField("deadline_ms") else {}
    deadline_ms = batch_deadline_ms(own, deadline_ms)
    entries = [_entry(request, entry_id(call_id, index), deadline_ms) for index, request in enumerate(message.requests)]
    del message.requests[:]
    refuse_unknown(message)
    return entries


def _entry(message: pb.RecommendRequest, request_id: str, deadline_ms: int | None) -> BatchEntry:
    def read() -> Any:
        refuse_unknown(message)
        return plain_of(message)

    return read_entry(message.request_id, read, request_id, deadline_ms)


def request_id_of(body: bytes, kind: type[Message] = pb.RecommendRequest) -> str | None:
    """Return the request id of a rejected message of this kind, if it can be read and is valid."""
    message: Any = kind()
    with suppress(DecodeError):
        message.ParseFromString(body)
        return valid_id(message.request_id if kind is pb.RecommendRequest else message.request.request_id)
    return None


def parse_events(body: bytes, max_bytes: int, max_events: int) -> tuple[EventBody, ...]:
    """Read events. Raises InvalidRequest or RequestTooLarge."""
    message = parse(pb.RecordEventsRequest, body, max_bytes)
    check_num_events(len(message.events), max_events)
    refuse_unknown(message)
    return read_events(plain_of(message).get("events", ()), max_events)


def format_batch(answers: Sequence[BatchAnswer]) -> pb.RecommendBatchResponse:
    return pb.RecommendBatchResponse(answers=[_outcome(answer) for answer in answers])


def _outcome(answer: BatchAnswer) -> pb.BatchAnswer:
    if isinstance(answer.outcome, Recommendation):
        return pb.BatchAnswer(recommendation=message_of(pb.RecommendResponse, answer.outcome))
    return pb.BatchAnswer(error=message_of(pb.Error, ErrorDetail.of(answer.outcome, answer.request_id)))
