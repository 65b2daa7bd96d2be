"""The effect of an event on a user's row: the only definition, for stream worker, offline replay and tests.

Pure: no Kafka, Feast, clock or randomness. A history is in order of arrival, not of event time, because then it is
append-only: the state after any event is the result of a log prefix, so a replay reproduces the served rows, and an
engine's cached prefix of a user's history stays valid. Late events are appended, and `newest_event_time_ms` is the
maximum so far.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from models.prompt import STRIDE_ITEMS, window_start
from services.contracts.event_roles import DEFAULT_ROLES, EventRoles, Role
from services.contracts.events import REMEMBERED_EVENTS
from services.features.schema import DIGEST_BYTES, LogPosition, UserHistory, event_digest


class SkipReason(StrEnum):
    """Why an event changed nothing."""

    OLD_OFFSET = "old_offset"
    DUPLICATE_EVENT = "duplicate_event"


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    """One interaction and its position in the log. `event_time_us` is Unix µs."""

    user_id: str
    item_id: str
    event_id: str
    event_time_us: int
    position: LogPosition
    event_type: str = "click"
    value: float = 1.0


@dataclass(frozen=True, slots=True)
class HistoryLimits:
    """The sizes of a row: newest items, disliked items (same number), and recent event ids, which detect retries.

    Items are cut in whole strides (1 to `max_items`), as in prompts, so that a full row still grows only at its end and
    an engine's prefix cache stays valid.
    """

    max_items: int
    stride: int = 1
    max_event_ids: int = REMEMBERED_EVENTS


def history_limits(max_items: int) -> HistoryLimits:
    """Return the limits of served histories: at most `max_items`, cut in prompt strides; a short row keeps half."""
    return HistoryLimits(max_items, stride=min(STRIDE_ITEMS, max(1, max_items // 2)))


@dataclass(frozen=True, slots=True)
class AppliedEvents:
    """A user's row after some events (None if the user still has no row), and why events were skipped.

    An unchanged row is the same object as before.
    """

    row: UserHistory | None
    num_applied: int
    skipped: tuple[SkipReason, ...]


def apply(
    row: UserHistory | None, events: Sequence[LoggedEvent], limits: HistoryLimits, roles: EventRoles = DEFAULT_ROLES
) -> AppliedEvents:
    """Apply one user's events in log order, each in its role.

    Offsets that the row has seen are skipped, unless they belong to another topic id or partition: a recreated topic
    starts at 0 again. An event id that the row remembers is skipped too and becomes the most recent id. The row forgets
    the least recently seen id, so a repeat is detected if fewer than `max_event_ids` other events were sent in between.
    """
    num_applied = 0
    skipped: list[SkipReason] = []
    for event in events:
        if row is not None and row.position.covers(event.position):
            skipped.append(SkipReason.OLD_OFFSET)
            continue
        before, digest = row or _empty_row(event), event_digest(event.event_id)
        if (start := _place(before.recent_event_digests, digest)) is None:
            row = _after(before, event, digest, roles.role(event.event_type, event.value), limits)
            num_applied += 1
        else:
            row = _seen_again(before, start)
            skipped.append(SkipReason.DUPLICATE_EVENT)
    return AppliedEvents(row, num_applied, tuple(skipped))


def _place(digests: bytes, digest: bytes) -> int | None:
    """Return the start of a digest in the concatenated digests; None if it is absent."""
    start = digests.find(digest)
    while start >= 0 and start % DIGEST_BYTES:  # a match across the boundary of two digests
        start = digests.find(digest, start + 1)
    return start if start >= 0 else None


def _seen_again(row: UserHistory, start: int) -> UserHistory:
    """Return the row with the digest at this offset moved to the end."""
    digests, end = row.recent_event_digests, start + DIGEST_BYTES
    if end == len(digests):
        return row
    return replace(row, recent_event_digests=digests[:start] + digests[end:] + digests[start:end])


def _after(before: UserHistory, event: LoggedEvent, digest: bytes, role: Role, limits: HistoryLimits) -> UserHistory:
    """Return the row after an event in this role. An ignored event moves only the position: the row's time stays."""
    if role is Role.IGNORED:
        return replace(before, position=event.position)
    item_ids, num_events, disliked = before.item_ids, before.num_events, before.disliked_item_ids
    if role is Role.NEGATIVE:
        disliked = (*_without(disliked, event.item_id), event.item_id)[-limits.max_items :]
    else:
        item_ids = (*item_ids, event.item_id)
        item_ids = item_ids[window_start(len(item_ids), limits.max_items, limits.stride) :]
        num_events += 1
        disliked = _without(disliked, event.item_id) if role is Role.POSITIVE else disliked
    return replace(
        before,
        item_ids=item_ids,
        newest_event_time_ms=max(before.newest_event_time_ms, event.event_time_us // 1_000),
        num_events=num_events,
        row_time_us=max(before.row_time_us + 1, event.event_time_us),
        position=event.position,
        disliked_item_ids=disliked,
        recent_event_digests=_newest(before.recent_event_digests + digest, limits.max_event_ids),
    )


def _empty_row(event: LoggedEvent) -> UserHistory:
    return UserHistory(
        user_id=event.user_id,
        item_ids=(),
        newest_event_time_ms=0,
        num_events=0,
        row_time_us=event.event_time_us - 1,
        position=event.position,
    )


def _newest(digests: bytes, num: int) -> bytes:
    return digests[max(0, len(digests) - num * DIGEST_BYTES) :]


def _without(item_ids: tuple[str, ...], item_id: str) -> tuple[str, ...]:
    return tuple(other for other in item_ids if other != item_id) if item_id in item_ids else item_ids
