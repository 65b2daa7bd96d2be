"""The counts of a stage against a slow count of all records, for any order, repeats and lateness."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.registry.canary import Canary, CanaryStage
from pipelines.experiments.user_sums import UserSums
from pipelines.experiments.verdict import Affected, Means
from pipelines.release.counts import StageCounts
from pipelines.release.decision import Act, decide
from services.contracts.events import Impression, Interaction
from services.contracts.experiments import place_of

SINCE_MS = 1_800_000_000_000
WINDOW_MS, GRACE_MS = 60_000, 10_000
CANARY = Canary(
    version="new",
    salt="s",
    stages=(CanaryStage(0.5, 600.0),),
    by="someone",
    at="2027-01-15T08:00:00Z",
    since_ms=SINCE_MS,
)
USERS = [f"u{number}" for number in range(6)]
ITEMS = [f"i{number}" for number in range(4)]


def is_candidate(user_id: str) -> bool:
    return place_of("s", user_id) < 0.5


def shown(number: int, **changes: Any) -> Impression:
    """Build an impression by the user's assigned version."""
    user_id = changes.get("user_id", "u0")
    fields: dict[str, Any] = {
        "request_id": f"r{number}",
        "user_id": user_id,
        "shown_time_ms": SINCE_MS + number * 1_000,
        "item_ids": ("i0", "i1"),
        "tier": "student",
        "reason": "short_history",
        "bundle_version": "new" if user_id and is_candidate(user_id) else "old",
        "history_len": 0,
        "history_digest": "",
        "elapsed_ms": 10.0,
        "deadline_ms": 100,
    }
    return Impression(**fields | changes)


impressions = st.builds(
    lambda number, user, items, late_ms, reason: shown(
        number, user_id=USERS[user], item_ids=tuple(ITEMS[index] for index in items), elapsed_ms=late_ms, reason=reason
    ),
    st.integers(0, 300),
    st.integers(0, 5),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([5.0, 50.0, 500.0]),
    st.sampled_from(["short_history", "student_failed", "llm_too_slow"]),
)
clicks = st.builds(
    lambda event, user, item, second, request: Interaction(
        event_id=f"e{event}",
        user_id=USERS[user],
        item_id=ITEMS[item],
        event_time_ms=SINCE_MS + second * 1_000,
        request_id=None if request is None else f"r{request}",
    ),
    st.integers(0, 40),
    st.integers(0, 5),
    st.integers(0, 3),
    st.integers(0, 400),
    st.none() | st.integers(0, 300),
)


def counted(lists: Sequence[Impression], events: Sequence[Interaction]) -> dict[bool, dict[str, dict[str, float]]]:
    """Count slowly: each list once, each event once, each click searched among all lists."""
    distinct = {
        (impression.request_id, impression.user_id, impression.shown_time_ms): impression
        for impression in reversed(lists)
    }
    first = {event.event_id: event for event in sorted(events, key=lambda event: -event.event_time_ms)}
    clicked = set()
    for event in first.values():
        fitting = []
        for key, impression in distinct.items():
            slack_ms = 60_000 if event.request_id else 0
            is_its = key[0] == event.request_id if event.request_id else True
            if (
                is_its
                and event.item_id in impression.item_ids
                and impression.shown_time_ms <= event.event_time_ms + slack_ms
            ):
                fitting.append(key)
        if not event.request_id:
            fitting = [key for key in fitting if key[1] == event.user_id]
        if fitting:
            key = max(fitting, key=lambda key: (key[2], key[0]))
            if key[1] == event.user_id and event.event_time_ms - key[2] <= WINDOW_MS:
                clicked.add((key, event.item_id))
    totals: dict[bool, dict[str, dict[str, float]]] = {True: {}, False: {}}
    for key, impression in distinct.items():
        assert key[1] is not None
        user = totals[is_candidate(key[1])].setdefault(key[1], defaultdict(float))
        user["lists"] += 1
        user["latency"] += min(impression.elapsed_ms or 0.0, 100.0)
        user["late"] += (impression.elapsed_ms or 0.0) > 100
        user["failed"] += impression.reason == "student_failed"
        user["clicks"] += sum((key, item) in clicked for item in set(impression.item_ids))
    return totals


def sums(users: dict[str, dict[str, float]], total: str) -> UserSums:
    return UserSums.of(*(np.array([user[name] for user in users.values()], dtype=float) for name in (total, "lists")))


def near(first: UserSums, other: UserSums) -> bool:
    """Return whether two sums are equal up to rounding."""
    pairs = ((getattr(first, name), getattr(other, name)) for name in UserSums.__dataclass_fields__)
    return all(math.isclose(left, right, abs_tol=1e-6) for left, right in pairs)


@settings(max_examples=60)
@given(
    st.lists(impressions, max_size=25),
    st.lists(
        clicks, max_size=25, unique_by=lambda click: (click.event_id, click.event_time_ms)
    ),  # duplicates at one time have no first
    st.randoms(),
    st.integers(0, 3),
)
def test_counts_are_those_of_all_records(
    lists: list[Impression], events: list[Interaction], draw: Any, num_repeats: int
) -> None:
    """Records in any order, with repeats and intermediate looks, give the counts of a single slow pass."""
    counts = StageCounts("default", CANARY, "old", window_ms=WINDOW_MS, grace_ms=GRACE_MS)
    distinct = list(
        {
            (impression.request_id, impression.user_id, impression.shown_time_ms): impression for impression in lists
        }.values()
    )
    sent: list[Impression | Interaction] = [*distinct, *events, *(distinct + events)[:num_repeats]]
    draw.shuffle(sent)
    cut = draw.randint(0, len(sent))
    for part in (sent[:cut], sent[cut:]):
        counts.add(
            [record for record in part if isinstance(record, Impression)],
            [record for record in part if isinstance(record, Interaction)],
        )
        seen = counts.look(SINCE_MS)

    slow = counted(distinct, events)
    clicked, latency, failed = (seen.counts[name] for name in ("clicks", "latency", "errors"))
    assert isinstance(clicked, Means)
    assert isinstance(latency, Means)
    for of, fast in ((True, (clicked.candidate, latency.candidate)), (False, (clicked.control, latency.control))):
        assert near(fast[0], sums(slow[of], "clicks"))
        assert near(fast[1], sums(slow[of], "latency"))
    hit = [sum(user["failed"] > 0 for user in slow[of].values()) for of in (True, False)]
    assert isinstance(failed, Affected)
    assert (failed.candidate, failed.control) == (hit[0], hit[1])
    assert failed.lists is not None
    assert near(failed.lists.candidate, sums(slow[True], "failed"))
    assert seen.num_lists == tuple(sum(user["lists"] for user in slow[of].values()) for of in (True, False))


@settings(max_examples=20)
@given(st.lists(impressions, max_size=25), st.lists(clicks, max_size=25, unique_by=lambda click: click.event_id))
def test_closed_impressions_keep_their_counts(lists: list[Impression], events: list[Interaction]) -> None:
    """Closing old impressions at regular looks does not change the counts."""
    distinct = list(
        {
            (impression.request_id, impression.user_id, impression.shown_time_ms): impression for impression in lists
        }.values()
    )
    closing = StageCounts("default", CANARY, "old", window_ms=WINDOW_MS, grace_ms=GRACE_MS)
    open_ones = StageCounts("default", CANARY, "old", window_ms=WINDOW_MS, grace_ms=10**12)
    for second in range(0, 700, 70):
        now_ms = SINCE_MS + second * 1_000
        new = [impression for impression in distinct if now_ms - 70_000 <= impression.shown_time_ms < now_ms]
        clicked = [event for event in events if now_ms - 70_000 <= event.event_time_ms < now_ms]
        for counts in (closing, open_ones):
            counts.add(new, clicked)
            seen = counts.look(now_ms)
    before = closing.look(now_ms)

    assert before.num_lists == seen.num_lists
    for name in ("clicks", "latency"):
        fast, slow = before.counts[name], seen.counts[name]
        assert isinstance(fast, Means)
        assert isinstance(slow, Means)
        assert near(fast.candidate, slow.candidate)
        assert near(fast.control, slow.control)


def test_foreign_impressions_are_left_out() -> None:
    """Visitors, other names and versions, and earlier impressions are ignored; a missing name means the default."""
    counts = StageCounts("default", CANARY, "old")
    counts.add(
        [
            shown(1, user_id=None),
            shown(2, name="mail"),
            shown(3, bundle_version="older"),
            shown(4, shown_time_ms=SINCE_MS - 1),
            shown(5),
            shown(6, name="default"),
        ],
        [],
    )

    assert sum(counts.look(SINCE_MS).num_lists) == 2


def test_the_version_that_should_not_have_answered_is_noticed() -> None:
    """Lists of the candidate's users made by the live version count for the candidate, with their fraction."""
    user = next(user for user in USERS if is_candidate(user))
    counts = StageCounts("default", CANARY, "old")
    counts.add([shown(n, user_id=user, bundle_version="old" if n < 3 else "new") for n in range(12)], [])

    seen = counts.look(SINCE_MS)

    assert (seen.num_lists, seen.stray_share) == ((12, 0), 0.25)


def test_variety_is_what_the_list_before_of_another_user_did_not_hold() -> None:
    """Variety is the fraction of items not in another user's previous list; a user's own previous list is skipped."""
    first, other = [user for user in USERS if is_candidate(user)][:2]
    counts = StageCounts("default", CANARY, "old")
    lists = [("abcd", first), ("abef", other), ("wxyz", other)]
    counts.add([shown(n, user_id=user, item_ids=tuple(items)) for n, (items, user) in enumerate(lists)], [])

    variety = counts.look(SINCE_MS).counts["variety"]

    assert isinstance(variety, Means)
    assert (variety.candidate.total, variety.candidate.exposure) == (0.5, 1.0)


def test_memory_is_bounded_by_leaving_users_out() -> None:
    """Beyond the limits, users of the larger version are dropped at random, and the candidate's fraction adjusts."""
    canary = replace(CANARY, stages=(CanaryStage(0.2, 600.0),))
    counts = StageCounts("default", canary, "old", max_rows=1_000, max_users=400)
    for start in range(0, 20_000, 1_000):
        users = [f"u{number}" for number in range(start, start + 1_000)]
        counts.add([shown(n, user_id=user) for n, user in enumerate(users, start)], [])
    seen = counts.look(SINCE_MS)

    assert sum(seen.num_users) <= 400
    assert seen.share > 0.4
    of_candidate = seen.num_users[0] / sum(seen.num_users)
    assert of_candidate == pytest.approx(seen.share, abs=0.15)


@pytest.mark.parametrize("part", [0.3, 0.03])
def test_requests_that_got_no_list_are_counted_by_assigned_user(part: float) -> None:
    """A candidate that fails 3 % of its requests is withdrawn; an equal candidate is not, and no user is missing."""
    draw, releasing = np.random.default_rng(3), replace(CANARY, stages=(CanaryStage(0.5, 600.0), CanaryStage(1.0, 0.0)))
    outcomes = {}
    for failing in (0.0, part):
        counts = StageCounts("default", releasing, "old")
        lists = []
        for number in range(6_000):
            user_id = f"user-{draw.integers(1_500)}"
            fails = is_candidate(user_id) and draw.random() < failing
            changes = (
                {"item_ids": (), "tier": "", "reason": "", "failure": "internal", "elapsed_ms": None} if fails else {}
            )
            impression = shown(number, user_id=user_id)
            lists.append(msgspec.structs.replace(impression, shown_time_ms=SINCE_MS + 100 * number, **changes))
        counts.add(lists, [])
        seen = counts.look(SINCE_MS + 700_000)
        outcomes[failing] = decide(releasing, seen, SINCE_MS + 700_000)
        assert sum(seen.num_new) == sum(seen.num_users) == len({impression.user_id for impression in lists})
        assert sum(seen.num_lists) == sum(impression.failure is None for impression in lists)

    assert not outcomes[0.0].lost_users
    assert outcomes[0.0].act is not Act.WITHDRAW
    assert (outcomes[part].act, "errors worse" in outcomes[part].reason) == (Act.WITHDRAW, True)


def test_failures_are_told_from_refusals_and_empty_lists() -> None:
    """Failures, refusals and empty lists are counted separately by user."""
    user = next(user for user in USERS if is_candidate(user))
    other = next(candidate for candidate in USERS if is_candidate(candidate) and candidate != user)
    counts = StageCounts("default", CANARY, "old")
    counts.add(
        [
            shown(0, user_id=user, item_ids=("i0",)),
            shown(1, user_id=other, item_ids=(), failure="invalid_request"),
            shown(2, user_id=other, item_ids=(), failure="internal"),
            shown(3, user_id=other, item_ids=()),
            shown(4, user_id=user, item_ids=("i0",)),
        ],
        [],
    )

    seen = counts.look(SINCE_MS + 9_000)

    hit = {name: count.candidate for name, count in seen.counts.items() if isinstance(count, Affected)}
    assert {name: hit[name] for name in ("errors", "refusals", "missing")} == {"errors": 1, "refusals": 1, "missing": 1}
    assert seen.num_lists[0] == 3
