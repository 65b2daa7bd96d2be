"""The events in Kafka: interactions of users, and impressions.

One interaction is one JSON object in UTF-8; the record's key is the user id, so one partition owns a user. Decoding is
strict, because an unknown field is a producer's mistake that would otherwise go unnoticed. No clock here: the time
against which events are too old or in the future is an argument.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from pydantic import TypeAdapter, ValidationError

from services.contracts.recommend import check_id
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
SENT_FIELDS = frozenset({"event_id", "user_id", "item_id", "event_type", "event_time_ms", "value", "request_id"})
"""The fields of an event that a caller may send; a record also has `accepted_time_ms`."""
_FIELDS = SENT_FIELDS | {"accepted_time_ms"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Interaction:
    """One user action on one item.

    `event_id` makes a repeated delivery by the caller harmless. `event_time_ms` is when it happened (Unix ms),
    `accepted_time_ms` when a door accepted it (None from foreign producers). `request_id` names the impression that it
    came from.
    """

    event_id: str
    user_id: str
    item_id: str
    event_time_ms: int
    event_type: str = "click"
    value: float = 1.0
    request_id: str | None = None
    accepted_time_ms: int | None = None

    def __post_init__(self) -> None:
        """Check the fields. Raises InvalidRequest naming the field."""
        for name in ("event_id", "user_id", "item_id", "event_type"):
            check_id(name, getattr(self, name))
        if self.request_id is not None:
            check_id("request_id", self.request_id)
        for name in ("event_time_ms", "accepted_time_ms"):
            if not 0 <= (getattr(self, name) or 0) <= _LAST_TIME_MS:
                raise InvalidRequest(name, "not between the years 1970 and 9999", "send Unix milliseconds")
        if not _is_finite(self.value):
            raise InvalidRequest("value", "not a finite number", "send a finite number")

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
        present = {key: value for key, value in asdict(self).items() if value is not None}
        return json.dumps(present, separators=(",", ":"), ensure_ascii=False).encode()

    @property
    def key(self) -> bytes:
        """The record's key: the user id."""
        return self.user_id.encode()


@dataclass(frozen=True, slots=True)
class Recorded:
    """Events that the broker has acknowledged: ids in the order sent, and distinct items that the live catalogue lacks.

    `accepted` counts an id that was sent several times once. While no bundle is loaded, every item counts as known.
    """

    event_ids: tuple[str, ...]
    unknown_items: tuple[str, ...]
    accepted: int


def decode_interaction(value: bytes | None) -> Interaction:
    """Read a record's value. Raises InvalidRequest with the field that is wrong."""
    return interaction_from(parse_value(value))


def parse_value(value: bytes | None) -> dict[str, Any]:
    """Read a record's value as one JSON object. Raises InvalidRequest."""
    try:
        fields = json.loads(value or b"")
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("value", "not JSON", "send one JSON object per record") from error
    if not isinstance(fields, dict):
        raise InvalidRequest("value", "not a JSON object", "send one JSON object per record")
    return fields


def interaction_from(fields: Mapping[str, Any]) -> Interaction:
    """Build an interaction from parsed JSON.

    Raises InvalidRequest with the field that is missing, unknown or mistyped.
    """
    refuse_unknown(fields, _FIELDS)
    for name in ("event_id", "user_id", "item_id", "event_time_ms"):
        if fields.get(name) is None:
            raise InvalidRequest(name, "missing", "it is required")
    for name in fields.keys() & {"event_id", "user_id", "item_id", "event_type", "request_id"}:
        if not isinstance(fields[name], str):
            raise InvalidRequest(name, "not a string", "send a string")
    for name in fields.keys() & {"event_time_ms", "accepted_time_ms"}:
        if isinstance(fields[name], float) and _SECONDS.start <= fields[name] < _SECONDS.stop:
            raise _in_seconds(name, fields[name])
        if not isinstance(fields[name], int) or isinstance(fields[name], bool):
            raise InvalidRequest(name, "not an integer", "send Unix time in milliseconds")
    if not isinstance(fields.get("value", 1.0), int | float) or isinstance(fields.get("value"), bool):
        raise InvalidRequest("value", "not a number", "send a number")
    return Interaction(**fields)


def check_written_time(name: str, time_ms: int) -> None:
    """Refuse a time at which no gateway can have written a record: seconds, microseconds, zero.

    Raises InvalidRequest.
    """
    if time_ms in _SECONDS:
        raise _in_seconds(name, time_ms)
    if not _FIRST_WRITTEN_MS <= time_ms <= _LAST_TIME_MS:
        raise InvalidRequest(name, "not between the years 2001 and 9999", "send Unix milliseconds")


def refuse_unknown(fields: Iterable[str], known: frozenset[str]) -> None:
    """Refuse an unknown field. Raises InvalidRequest naming it."""
    for name in fields:
        if name not in known:
            raise InvalidRequest(name, "unknown", f"the fields are {', '.join(sorted(known))}")


def _in_seconds(name: str, time: float) -> InvalidRequest:
    return InvalidRequest(
        name, f"{time} looks like seconds", "send Unix milliseconds: the seconds times 1,000, as an integer"
    )


def _is_finite(value: float) -> bool:
    """Whether a number is finite as a float; JSON integers can be larger than any float."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Impression:
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
        session: Of a visitor without a user id, a hash of the session by which experiments assign.
        failure: Error code, or `shed`, of a request that got no list of the bundle assigned to its user; recorded
            during releases, only canary analysis reads it.
    """

    request_id: str
    user_id: str | None = None
    shown_time_ms: int
    item_ids: tuple[str, ...]
    tier: str
    reason: str
    bundle_version: str
    newest_event_time_ms: int | None = None
    history_len: int
    history_digest: str
    features_as_of_us: int | None = None
    surface: str | None = None
    name: str | None = None
    variant: str | None = None
    positions: tuple[int, ...] | None = None
    scores: tuple[float, ...] | None = None
    propensity: tuple[float, ...] | None = None
    elapsed_ms: float | None = None
    deadline_ms: int | None = None
    session: str | None = None
    failure: str | None = None

    def encode(self) -> bytes:
        """Return the record's value: compact JSON without absent fields."""
        present = {key: value for key, value in asdict(self).items() if value is not None}
        return json.dumps(present, separators=(",", ":"), ensure_ascii=False).encode()

    def __post_init__(self) -> None:
        """Check the fields that storage needs. Raises InvalidRequest naming the field."""
        if self.user_id is not None:
            check_id("user_id", self.user_id)
        check_id("request_id", self.request_id)
        if not 0 <= self.shown_time_ms <= _LAST_TIME_MS:
            raise InvalidRequest("shown_time_ms", "not between the years 1970 and 9999", "send Unix milliseconds")

    @property
    def key(self) -> bytes:
        """The record's key: the user id, or the request id of an anonymous visitor."""
        return (self.user_id or self.request_id).encode()


def decode_impression(value: bytes | None) -> Impression:
    """Read a record's value. Unknown fields of a newer gateway are ignored.

    Raises InvalidRequest naming the wrong field.
    """
    try:
        found = _IMPRESSION.validate_json(value or b"", strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise InvalidRequest(".".join(map(str, first["loc"])) or "value", first["msg"], _AS_A_GATEWAY) from error
    check_written_time("shown_time_ms", found.shown_time_ms)
    for name in _INTEGERS:
        if not 0 <= (getattr(found, name) or 0) <= _MAX_INTEGER:
            raise InvalidRequest(name, "below 0 or above 2^53", _AS_A_GATEWAY)
    for place, position in enumerate(found.positions or ()):
        if not 1 <= position <= _MAX_POSITION:
            raise InvalidRequest(f"positions[{place}]", f"below 1 or above {_MAX_POSITION}", _AS_A_GATEWAY)
    for place, probability in enumerate(found.propensity or ()):
        if not 0 <= probability <= 1:
            raise InvalidRequest(f"propensity[{place}]", "not a probability", _AS_A_GATEWAY)
    return found


_AS_A_GATEWAY = "send what a gateway sends"
_MAX_INTEGER, _MAX_POSITION = 1 << 53, 1_000_000
_IMPRESSION = TypeAdapter(Impression)
_INTEGERS = tuple(one.name for one in fields(Impression) if one.type in (int, int | None))
