"""Replays events through the stream worker's own aggregate: offline features cannot differ from online ones. Pure."""

from collections.abc import Iterable, Iterator

from services.features.rows import LogPosition, UserHistory
from services.stream.aggregate import Limits, LoggedEvent, apply

BATCH_TOPIC = "batch"
"""The topic id of rows that come from a replay; the first event of a real topic goes on top of them."""


def replay(events: Iterable[tuple[str, str, int]], limits: Limits) -> Iterator[UserHistory]:
    """Return the user's row after each of these events (user id, item id, Unix µs), in their order."""
    rows: dict[str, UserHistory] = {}
    for number, (user_id, item_id, time_us) in enumerate(events):
        event = LoggedEvent(user_id, item_id, f"{BATCH_TOPIC}-{number}", time_us, LogPosition(BATCH_TOPIC, 0, number))
        row = apply(rows.get(user_id), [event], limits).row
        assert row is not None
        rows[user_id] = row
        yield row
