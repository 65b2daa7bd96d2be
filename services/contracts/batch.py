"""Several recommendation requests in one call, answered individually in the order sent."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from services.contracts.message import MAX_ID_CHARS, Message
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


def entry_id(call_id: str, place: int) -> str:
    """Return the id of an entry without an id."""
    return f"{call_id[: MAX_ID_CHARS - _PLACE_CHARS]}.{place}"


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


def check_entry_deadline(deadline_ms: int | None) -> None:
    """Refuse an entry's own deadline: the deadline applies to the whole call. Raises InvalidRequest."""
    if deadline_ms is not None:
        raise InvalidRequest("deadline_ms", "set for one entry", "set it once, beside requests")
