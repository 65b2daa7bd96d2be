"""The events in Kafka: interactions of users, and impressions.

One interaction is one JSON object in UTF-8; the record's key is the user id, so one partition owns a user. Decoding is
strict, because an unknown field is a producer's mistake that would otherwise go unnoticed. No clock here: the time
against which events are too old or in the future is an argument.
"""

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from services.contracts.message import Answer, Id, Message, check_id, decode
from services.contracts.tenant import StoredId, check_stored_id, tenant_of, tenant_of_name
from services.errors import InvalidRequest

MAX_EVENT_AGE_MS = 30 * 24 * 3_600_000
MAX_EVENT_LEAD_MS = 60_000
REMEMBERED_EVENTS = 1_024
"""The number of recent event ids per user that detect a repeated delivery."""
MAX_EVENTS_PER_REQUEST = REMEMBERED_EVENTS // 2
"""Limits one request, so that a repeated request is recognised even after one other request."""
_LAST_TIME_MS = 253_402_300_799_999
_SECONDS = range(10**9, 10**10)
"""Unix seconds from 2001 to 2286, which read as milliseconds would all be in January to April 1970."""
_FIRST_WRITTEN_MS = 10**12
"""In 2001: earlier than any time at which a gateway wrote a record, in any unit."""

TimeMs = Annotated[int, Meta(ge=0, le=_LAST_TIME_MS)]
"""Unix milliseconds between the years 1970 and 9999."""
_Count = Annotated[int, Meta(ge=0, le=1 << 53)]


class EventBody(Message, frozen=True):
    """One user action on an item."""

    user_id: Annotated[Id, Meta(examples=["196"])]
    item_id: Annotated[Id, Meta(examples=["242"])]
    event_type: Annotated[Id, Meta(examples=["click"])] = "click"
    event_time_ms: Annotated[
        TimeMs | None,
        Meta(
            description=f"Unix milliseconds, at most {MAX_EVENT_AGE_MS // 86_400_000} days ago and "
            f"{MAX_EVENT_LEAD_MS // 1_000} s ahead; absent: now"
        ),
    ] = None
    value: float = 1.0
    event_id: Annotated[
        Id | None,
        Meta(
            description="Send one to make a repeat harmless: it is recognised among the user's "
            f"{REMEMBERED_EVENTS} newest events"
        ),
    ] = None
    request_id: Annotated[Id | None, Meta(description="The answer that the user acted on")] = None


class EventsBody(Message, frozen=True):
    """Many events."""

    events: Annotated[tuple[EventBody, ...], Meta(min_length=1)]


class Interaction(EventBody, frozen=True, kw_only=True):
    """One user action on one item.

    `event_id` makes a repeated delivery by the caller harmless. `event_time_ms` is when it happened (Unix ms),
    `accepted_time_ms` when a door accepted it (None from foreign producers). `request_id` names the impression that it
    came from.
    """

    user_id: StoredId
    event_id: Id
    event_time_ms: TimeMs
    accepted_time_ms: TimeMs | None = None

    def __post_init__(self) -> None:
        """Check texts and numbers. Raises InvalidField."""
        super().__post_init__()
        check_stored_id("user_id", self.user_id)

    def check_unit(self) -> None:
        """Refuse a time that was written in seconds. Raises InvalidRequest."""
        for name in ("event_time_ms", "accepted_time_ms"):
            if (getattr(self, name) or 0) in _SECONDS:
                raise _in_seconds(name, getattr(self, name))

    def check_time(self, now_ms: int) -> None:
        """Refuse an event from the future or from too long ago. Raises InvalidRequest."""
        self.check_unit()
        if self.event_time_ms > now_ms + MAX_EVENT_LEAD_MS:
            raise InvalidRequest(
                "event_time_ms", "in the future", f"send Unix milliseconds, at most {MAX_EVENT_LEAD_MS // 1000} s ahead"
            )
        if self.event_time_ms < now_ms - MAX_EVENT_AGE_MS:
            raise InvalidRequest(
                "event_time_ms",
                f"older than {MAX_EVENT_AGE_MS // 86_400_000} days",
                "load old events with `tailrace pipeline --events`",
            )

    def encode(self) -> bytes:
        """Return the record's value: compact JSON without absent fields."""
        fields = msgspec.structs.asdict(self)
        return msgspec.json.encode({name: value for name, value in fields.items() if value is not None})

    @property
    def key(self) -> bytes:
        return self.user_id.encode()


class RecordEventsResponse(Answer, frozen=True):
    """Number of events that the broker acknowledged, with each id counted once, and all ids in the order sent.

    While no bundle is loaded, every item counts as known.
    """

    component: ClassVar = "RecordedBody"

    event_ids: tuple[str, ...]
    unknown_items: Annotated[
        tuple[str, ...],
        Meta(
            description="Items of these events outside the live catalogue, without duplicates; the events are recorded"
        ),
    ]
    accepted: int


def decode_interaction(value: bytes | None) -> Interaction:
    """Read a record's value. Raises InvalidRequest with the field that is wrong."""
    return decode(Interaction, value or b"", "value")


def check_written_time(name: str, time_ms: int) -> None:
    """Refuse a time at which no gateway can have written a record: seconds, microseconds, zero.

    Raises InvalidRequest.
    """
    if time_ms in _SECONDS:
        raise _in_seconds(name, time_ms)
    if not _FIRST_WRITTEN_MS <= time_ms <= _LAST_TIME_MS:
        raise InvalidRequest(name, "not between the years 2001 and 9999", "send Unix milliseconds")


def _in_seconds(name: str, time: float) -> InvalidRequest:
    return InvalidRequest(
        name, f"{time} looks like seconds", "send Unix milliseconds: the seconds times 1,000, as an integer"
    )


class Impression(Message, frozen=True, kw_only=True, forbid_unknown_fields=False, omit_defaults=True):
    """One impression: the items shown to a user and the features behind them, for training joins and skew measurement.

    `history_len`, `history_digest` and `features_as_of_us` describe the history as it was served (see
    services.contracts.features). The other optional fields are absent if they do not apply, and in older records.

    Args:
        surface: The place in the product.
        name: The model name that answered.
        variant: The experiments' variants, as `services.contracts.experiments.variant_field` writes them.
        positions: The positions of the items, from 1; absent: 1, 2, and so on.
        scores: The items' scores, by the tier that ranked them.
        propensity: By item, the probability of showing it at its position given the items above it; absent without
            randomisation.
        elapsed_ms: From the request's arrival to its answer.
        deadline_ms: The request's deadline.
        session: Of a visitor without a user id, a hash of the session that experiments assign.
        failure: Error code, or `shed`, of a request that got no list of the bundle assigned to its user; recorded
            during releases, only canary analysis reads it.
    """

    request_id: str
    user_id: str | None = None
    shown_time_ms: TimeMs
    item_ids: tuple[str, ...]
    tier: str
    reason: str
    bundle_version: str
    newest_event_time_ms: _Count | None = None
    history_len: _Count
    history_digest: str
    features_as_of_us: _Count | None = None
    surface: str | None = None
    name: str | None = None
    variant: str | None = None
    positions: tuple[Annotated[int, Meta(ge=1, le=1_000_000)], ...] | None = None
    scores: tuple[float, ...] | None = None
    propensity: tuple[Annotated[float, Meta(ge=0, le=1)], ...] | None = None
    elapsed_ms: float | None = None
    deadline_ms: _Count | None = None
    session: str | None = None
    failure: str | None = None

    def __post_init__(self) -> None:
        """Check the ids that storage needs. Raises InvalidRequest naming the field."""
        if self.user_id is not None:
            check_stored_id("user_id", self.user_id)
        check_id("request_id", self.request_id)

    def encode(self) -> bytes:
        """Return the record's value: compact JSON without absent fields."""
        return msgspec.json.encode(self)

    @property
    def key(self) -> bytes:
        """The record's key: the user id, or the request id of an anonymous visitor."""
        return (self.user_id or self.request_id).encode()

    @property
    def tenant(self) -> str:
        """The owner: of the user, or of the name that answered an anonymous visitor."""
        return tenant_of_name(self.name or "") if self.user_id is None else tenant_of(self.user_id)


def decode_impression(value: bytes | None) -> Impression:
    """Read a record's value. Unknown fields of a newer gateway are ignored.

    Raises InvalidRequest naming the wrong field.
    """
    impression = decode(Impression, value or b"", "value")
    check_written_time("shown_time_ms", impression.shown_time_ms)
    return impression
