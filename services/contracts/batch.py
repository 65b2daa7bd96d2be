"""Several recommendation requests in one call, answered individually in the order sent."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from services.contracts.message import MAX_ID_CHARS, Message, convert, valid_id
from services.contracts.recommend import DeadlineMs, Recommendation, RecommendBody, RecommendRequest
from services.errors import InvalidRequest, TailraceError

MAX_BATCH = 100
_PLACE_CHARS = len(f".{MAX_BATCH}")


class BatchBody(Message, frozen=True):
    """Requests for several users; each is answered or rejected individually."""

    requests: Annotated[
        tuple[RecommendBody, ...],
        Meta(description="Each without deadline_ms", min_length=1, max_length=MAX_BATCH),
    ]
    deadline_ms: Annotated[
        DeadlineMs | None,
        Meta(description="For all of them together, from arrival; or header X-Deadline-Ms", examples=[1_000]),
    ] = None


@dataclass(frozen=True, slots=True)
class BatchEntry:
    """One request of a call, or the error in its place.

    The id is its own, or derived from the call's id and its position.
    """

    request_id: str
    request: RecommendRequest | TailraceError


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """One entry's answer, or the error that the entry would get by itself."""

    request_id: str
    outcome: Recommendation | TailraceError


def entry_id(call_id: str, index: int) -> str:
    """Return the id of an entry without an id."""
    return f"{call_id[: MAX_ID_CHARS - _PLACE_CHARS]}.{index}"


def check_batch_size(num_entries: int, announced: int | None) -> None:
    """Refuse a call with too many entries, or with a number of entries other than announced to the edge.

    Raises InvalidRequest.
    """
    if not 1 <= num_entries <= MAX_BATCH:
        raise InvalidRequest("requests", f"{num_entries} entries", f"send 1 to {MAX_BATCH}")
    if announced not in (None, num_entries):
        raise InvalidRequest(
            "x-batch-size", f"{announced}, and {num_entries} requests", "send their number, or no such header"
        )


def batch_deadline_ms(fields: Mapping[str, Any], header_ms: int | None) -> int | None:
    """Return the deadline of a call by its fields besides the requests, else the header's. Raises InvalidRequest."""
    whole = convert(BatchBody, {**fields, "requests": ({},)})
    return header_ms if whole.deadline_ms is None else whole.deadline_ms


def read_entry(sent_id: Any, read: Callable[[], Any], request_id: str, deadline_ms: int | None) -> BatchEntry:
    """Return one request of a call, whose plain values `read` returns; an invalid request becomes its error.

    The entry's own id wins, if it is valid. The deadline applies to the whole call.
    """
    request_id = valid_id(sent_id) or request_id
    try:
        return BatchEntry(request_id, _request_of(read(), request_id, deadline_ms))
    except InvalidRequest as error:
        return BatchEntry(request_id, error)


def _request_of(plain: Any, request_id: str, deadline_ms: int | None) -> RecommendRequest:
    body = convert(RecommendBody, plain)
    if body.deadline_ms is not None:
        raise InvalidRequest("deadline_ms", "set for one entry", "set it once, next to requests")
    return RecommendRequest.of(body, request_id, deadline_ms)
