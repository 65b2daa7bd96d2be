"""What an event does to a row."""

from hypothesis import given
from hypothesis import strategies as st

from models.prompt import window_start
from services.contracts.event_roles import HISTORY_ROLES, Role, parse_event_roles
from services.features.schema import LogPosition, UserHistory
from services.stream.aggregate import HistoryLimits, LoggedEvent, SkipReason, apply

LIMITS = HistoryLimits(max_items=5, max_event_ids=4)
ROLES = parse_event_roles("[types.view]\nrole = 'weak'\n[types.rating]\nmin_value = 4\nbelow = 'negative'")


def event(
    offset: int,
    *,
    topic: str = "t",
    partition: int = 0,
    event_id: str | None = None,
    time: int = 100,
    kind: str = "click",
    item: int | None = None,
) -> LoggedEvent:
    """Build an event whose item is named for its offset."""
    name = f"{topic}{offset}" if event_id is None else event_id
    position = LogPosition(topic, partition, offset)
    return LoggedEvent("u", f"item-{offset if item is None else item}", name, time, position, kind, offset % 6)


EVENTS = st.lists(
    st.builds(
        lambda offset, topic, name, time, kind, item: event(
            offset, topic=topic, event_id=name, time=time, kind=kind, item=item
        ),
        st.integers(0, 30),
        st.sampled_from("tu"),
        st.sampled_from([f"e{number}" for number in range(12)]),
        st.integers(0, 10_000),
        st.sampled_from(["click", "view", "rating", "dislike", "impression"]),
        st.integers(0, 8),
    ),
    max_size=40,
)


def test_what_was_seen_is_skipped_with_its_reason() -> None:
    """Offsets up to the row's, and a client's retry of one event id at another offset, change nothing."""
    row = apply(None, [event(4), event(5)], LIMITS).row

    outcome = apply(row, [event(4, event_id="x"), event(5, event_id="y"), event(6, event_id="t5")], LIMITS)

    assert outcome.row is row
    assert outcome.skipped == (SkipReason.OLD_OFFSET, SkipReason.OLD_OFFSET, SkipReason.DUPLICATE_EVENT)


@given(st.integers(0, 25), st.integers(0, 25), st.integers(1, 25))
def test_a_replay_from_any_earlier_offset_changes_nothing(start: int, crash: int, num_events: int) -> None:
    """After a crash the log is read again from an earlier offset: the row is as if it had been read once."""
    log = [event(offset, event_id=f"e{offset % 9}", time=(offset * 37) % 11) for offset in range(num_events)]
    crash = min(crash, num_events)
    row = apply(None, log[:crash], LIMITS).row

    again = apply(row, log[min(start, crash) :], LIMITS).row

    assert again == apply(None, log, LIMITS).row


@given(EVENTS, st.integers(0, 40))
def test_the_row_equals_a_list_of_applied_events(events: list[LoggedEvent], cut: int) -> None:
    """Oracle: keep all applied events in a list and derive each column from it, by the events' roles, for any split into batches.

    Every change has a later row time, but that of the position alone.
    """
    applied: list[LoggedEvent] = []
    counted: list[LoggedEvent] = []
    for one in events:
        seen = applied and applied[-1].position.topic_id == one.position.topic_id
        if seen and one.position.offset <= applied[-1].position.offset:
            continue
        if one.event_id not in [past.event_id for past in counted[-LIMITS.max_event_ids :]]:
            applied.append(one)
            counted += [one] if ROLES.role(one.event_type, one.value) is not Role.IGNORED else []

    first = apply(None, events[:cut], LIMITS, ROLES)
    second = apply(first.row, events[cut:], LIMITS, ROLES)

    assert first.num_applied + second.num_applied == len(applied)
    assert first.num_applied + second.num_applied + len(first.skipped) + len(second.skipped) == len(events)
    assert (second.row is None) == (not applied)
    if second.row is not None:
        held: list[str] = []
        disliked: list[str] = []
        row_time_us = applied[0].event_time_us - 1
        for past in counted:
            role = ROLES.role(past.event_type, past.value)
            held += [past.item_id] if role in HISTORY_ROLES else []
            if role in (Role.POSITIVE, Role.NEGATIVE):
                disliked = [item for item in disliked if item != past.item_id]
            if role is Role.NEGATIVE:
                disliked = [*disliked, past.item_id][-LIMITS.max_items :]
            row_time_us = max(row_time_us + 1, past.event_time_us)
        assert second.row == UserHistory(
            user_id="u",
            item_ids=tuple(held[-LIMITS.max_items :]),
            newest_event_time_ms=max((past.event_time_us for past in counted), default=0) // 1_000,
            num_events=len(held),
            row_time_us=row_time_us,
            recent_event_ids=tuple(past.event_id for past in counted[-LIMITS.max_event_ids :]),
            position=applied[-1].position,
            disliked_item_ids=tuple(disliked),
        )


def test_a_full_row_is_cut_where_its_prompt_is_cut() -> None:
    """The newest items that prompts keep are the same for the stored row as for the whole history, at every length."""
    limits = HistoryLimits(max_items=12, stride=4)
    for length in range(1, 60):
        whole = [event(offset).item_id for offset in range(length)]
        row = apply(None, [event(offset) for offset in range(length)], limits).row
        assert row is not None
        kept = row.item_ids

        assert 12 - 4 < len(kept) <= 12 or kept == tuple(whole)
        assert list(kept)[window_start(len(kept), 8, 4) :] == whole[window_start(length, 8, 4) :]
