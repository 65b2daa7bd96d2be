"""What waits for a checkpoint. Run: pytest tests/unit/stream/test_pending.py."""

from services.contracts.events import Interaction
from services.features.rows import LogPosition
from services.stream.decode import LoggedInteraction, Record
from services.stream.pending import Pending


def test_unreadable_records_move_the_offset_but_not_the_log() -> None:
    """A dead letter at the end of a batch is committed past, and is no event to log."""
    places = [LogPosition("t", 2, 7), LogPosition("t", 2, 8)]
    event = LoggedInteraction(Interaction(event_id="e", user_id="u", item_id="i", event_time_ms=1), places[0])
    pending = Pending()

    pending.add([Record(place, b"u", b"", 0) for place in places], [event])

    assert pending.next_offsets == {2: 9}
    assert pending.by_partition == {2: [event]}
    assert pending.num_events == 1


def test_a_checkpoint_leaves_nothing() -> None:
    """What was logged and committed is forgotten."""
    pending = Pending()
    pending.add([Record(LogPosition("t", 0, 0), None, None, 0)], [])

    pending.clear()

    assert pending.next_offsets == {}
    assert pending.num_events == 0
