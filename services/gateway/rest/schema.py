"""The REST door's JSON: requests to the contracts' messages.

Strict: unknown fields and wrong types are rejected by name, without conversions ("5" is not a number).
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import pydantic_core

from services.contracts.batch import BatchEntry, batch_deadline_ms, check_batch_size, entry_id, read_entry
from services.contracts.events import EventBody
from services.contracts.message import convert, decode, decode_object, decode_plain, valid_id
from services.contracts.recommend import (
    Filters,
    PopularIn,
    PopularQuery,
    RecommendBody,
    RecommendRequest,
    SearchFor,
    SearchQuery,
    SimilarBody,
    SimilarTo,
)
from services.errors import InvalidRequest
from services.gateway.events.record import read_events


def parse_recommend(body: bytes, request_id: str, deadline_ms: int | None) -> RecommendRequest:
    """Read a request; the body's own request id and deadline win. Raises InvalidRequest naming the field."""
    return RecommendRequest.of(decode(RecommendBody, body), request_id, deadline_ms)


def parse_similar(body: bytes, item_id: str, request_id: str, deadline_ms: int | None) -> RecommendRequest:
    """Read a request for items similar to this item and to the items in the body, which may be empty.

    Raises InvalidRequest naming the field.
    """
    sent = decode(SimilarBody, body or b"{}")
    subject = convert(SimilarTo, {"item_ids": (item_id, *sent.item_ids)})
    return RecommendRequest.of(sent, request_id, deadline_ms, subject)


def parse_popular(query: Iterable[tuple[str, str]], request_id: str, deadline_ms: int | None) -> RecommendRequest:
    """Read the query of a request for popular items. Raises InvalidRequest naming the parameter."""
    sent = convert(PopularQuery, parse_query(query, PopularQuery.__struct_fields__), strict=False)
    return RecommendRequest(
        request_id=request_id,
        session_id=sent.session_id,
        k=sent.k,
        filters=Filters(categories=None if sent.category is None else (sent.category,)),
        deadline_ms=deadline_ms,
        subject=PopularIn(sent.window),
    )


def parse_search(query: Iterable[tuple[str, str]], request_id: str, deadline_ms: int | None) -> RecommendRequest:
    """Read the query of a search. Raises InvalidRequest naming the parameter."""
    sent = convert(SearchQuery, parse_query(query, SearchQuery.__struct_fields__), strict=False)
    return RecommendRequest(
        request_id=request_id,
        user_id=sent.user_id,
        session_id=sent.session_id,
        surface=sent.surface,
        k=sent.k,
        deadline_ms=deadline_ms,
        subject=SearchFor(sent.q),
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
    """Read the requests of a batch; an unreadable entry is rejected individually.

    Raises InvalidRequest if the batch as a whole is invalid.
    """
    sent = decode_object(body)
    entries = sent.get("requests")
    if not isinstance(entries, list):
        raise InvalidRequest("requests", "not a list", 'send {"requests": [...]}')
    deadline_ms = batch_deadline_ms(sent, deadline_ms)
    check_batch_size(len(entries), None)
    return [_entry(entry, entry_id(call_id, index), deadline_ms) for index, entry in enumerate(entries)]


def _entry(sent: Any, request_id: str, deadline_ms: int | None) -> BatchEntry:
    sent_id = sent.get("request_id") if isinstance(sent, dict) else None
    return read_entry(sent_id, lambda: sent, request_id, deadline_ms)


def request_id_of(body: bytes) -> str | None:
    """Return the request id of a rejected body, if it can be read and is valid."""
    with suppress(ValueError):
        sent = pydantic_core.from_json(body, allow_partial=True)
        return valid_id(sent.get("request_id")) if isinstance(sent, dict) else None
    return None


def parse_events(body: bytes, max_events: int) -> tuple[EventBody, ...]:
    """Read `{"events": [...]}`, a list, or one event. Raises InvalidRequest."""
    sent = decode_plain(body)
    if isinstance(sent, dict) and "events" in sent:
        for name in sent.keys() - {"events"}:
            raise InvalidRequest(name, "unknown", "send only events")
        sent = sent["events"]
    drafts = [sent] if isinstance(sent, dict) else sent
    if not isinstance(drafts, list):
        raise InvalidRequest("events", "not a list", 'send {"events": [...]}')
    return read_events(drafts, max_events)
