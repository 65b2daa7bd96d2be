"""The effect of events on a user's row."""

import random
from dataclasses import replace
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from models.prompt import window_start
from services.contracts.event_roles import HISTORY_ROLES, Role, parse_event_roles
from services.contracts.events import MAX_EVENTS_PER_REQUEST, REMEMBERED_EVENTS
from services.features.schema import LogPosition, UserHistory, event_digest
from services.stream.aggregate import HistoryLimits, LoggedEvent, SkipReason, apply, history_limits

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
    """Return an event whose item is named after its offset."""
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


@given(EVENTS, st.integers(0, 40))
def test_the_row_equals_a_list_of_applied_events(events: list[LoggedEvent], cut: int) -> None:
    """For any split into batches, each column equals one derived from a list of all applied events."""
    applied: list[LoggedEvent] = []
    counted: list[LoggedEvent] = []
    remembered: list[str] = []
    for event in events:
        seen = applied and applied[-1].position.topic_id == event.position.topic_id
        if seen and event.position.offset <= applied[-1].position.offset:
            continue
        is_repeated = event.event_id in remembered
        if not is_repeated:
            applied.append(event)
            counted += [event] if ROLES.role(event.event_type, event.value) is not Role.IGNORED else []
        if is_repeated or ROLES.role(event.event_type, event.value) is not Role.IGNORED:
            others = [past for past in remembered if past != event.event_id]
            remembered = [*others, event.event_id][-LIMITS.max_event_ids :]

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
            position=applied[-1].position,
            disliked_item_ids=tuple(disliked),
            recent_event_digests=b"".join(map(event_digest, remembered)),
        )


def test_the_largest_request_counts_once() -> None:
    """Events of the largest request count once, however it is split, shuffled or interleaved with other requests."""
    numbers, limits = count(), history_limits(1_000)
    request = [f"e{number}" for number in range(MAX_EVENTS_PER_REQUEST)]
    shuffled = random.Random(0).sample(request, len(request))
    row, num_applied = None, []
    for index, names in enumerate((request[:200], request, shuffled, request[::3])):
        others = [f"{index // 2}/{number}" for number in range(MAX_EVENTS_PER_REQUEST)]
        for sent in (others, names):
            outcome = apply(row, [event(next(numbers), event_id=name) for name in sent], limits)
            row = outcome.row
            num_applied.append(outcome.num_applied)

    assert row is not None
    assert num_applied == [512, 200, 0, 312, 512, 0, 0, 0]
    assert row.num_events == sum(num_applied)
    assert len(row.recent_event_digests) == 8 * REMEMBERED_EVENTS


def test_an_id_is_none_that_two_others_make_together() -> None:
    """Bytes that span two digests do not match an event; the event's own digest behind them does."""
    digest = event_digest("new")
    across = digest[4:] + digest + digest[:4]
    row = apply(None, [event(1)], LIMITS).row
    assert row is not None

    met = apply(replace(row, recent_event_digests=across), [event(2, event_id="new")], LIMITS)
    again = apply(met.row, [event(3, event_id="new")], LIMITS)

    assert (met.num_applied, again.num_applied) == (1, 0)


class Repetitions(RuleBasedStateMachine):
    """Callers send new and repeated events. Oracle: the set of events sent since each event was last sent."""

    def __init__(self) -> None:
        super().__init__()
        self.row: UserHistory | None = None
        self.log: list[LoggedEvent] = []
        self.sent_since: dict[str, set[str]] = {}
        self.num_effects = 0

    def send(self, names: list[str]) -> None:
        """Append events to the log and apply them: new and forgotten events count, remembered events do not."""
        for name in names:
            sent = event(len(self.log), event_id=name)
            outcome = apply(self.row, [sent], LIMITS)
            is_forgotten = len(self.sent_since.get(name, range(LIMITS.max_event_ids))) >= LIMITS.max_event_ids
            self.log.append(sent)
            self.sent_since[name] = set()
            for other in self.sent_since.keys() - {name}:
                self.sent_since[other].add(name)
            self.row = outcome.row
            self.num_effects += outcome.num_applied

            assert outcome.num_applied == is_forgotten

    @rule(num=st.integers(1, LIMITS.max_event_ids))
    def send_new(self, num: int) -> None:
        self.send([f"e{len(self.log) + number}" for number in range(num)])

    @rule(ages=st.lists(st.integers(0, 3 * LIMITS.max_event_ids), max_size=LIMITS.max_event_ids))
    def repeat(self, ages: list[int]) -> None:
        self.send([self.log[-1 - age].event_id for age in ages if age < len(self.log)])

    @rule(num=st.integers(0, 3 * LIMITS.max_event_ids))
    def deliver_again(self, num: int) -> None:
        """Read the end of the log again, as after a crash: nothing changes."""
        assert apply(self.row, self.log[max(0, len(self.log) - num) :], LIMITS).row == self.row

    def teardown(self) -> None:
        """The row counts each effect, and equals the row of a single batch."""
        assert (self.row.num_events if self.row else 0) == self.num_effects
        assert self.row == apply(None, self.log, LIMITS).row


TestRepetitions = Repetitions.TestCase
TestRepetitions.settings = settings(max_examples=50, stateful_step_count=20)


def test_a_full_row_is_cut_where_its_prompt_is_cut() -> None:
    """At every length, prompts keep the same newest items for the stored row as for the whole history."""
    limits = HistoryLimits(max_items=12, stride=4)
    for length in range(1, 60):
        whole = [event(offset).item_id for offset in range(length)]
        row = apply(None, [event(offset) for offset in range(length)], limits).row
        assert row is not None
        kept = row.item_ids

        assert 12 - 4 < len(kept) <= 12 or kept == tuple(whole)
        assert list(kept)[window_start(len(kept), 8, 4) :] == whole[window_start(length, 8, 4) :]
