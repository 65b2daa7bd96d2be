"""Events from before an erasure that arrive after it."""

from pathlib import Path

from services.contracts.erasure import Erasure
from services.contracts.events import Interaction
from services.features.schema import LogPosition
from services.stream.decode import LoggedErasure, LoggedInteraction
from services.stream.erasure.late import without_late
from services.stream.log.ledger import ErasureLedger


def event(offset: int, user_id: str, time_ms: int) -> LoggedInteraction:
    """Return an interaction of this time."""
    interaction = Interaction(user_id=user_id, item_id="i", event_id=f"e{offset}", event_time_ms=time_ms)
    return LoggedInteraction(interaction, LogPosition("t", 0, offset))


def erasure(offset: int, user_id: str, accepted_ms: int) -> LoggedErasure:
    """Return an erasure accepted at this time."""
    sent = Erasure(erasure_id=f"x{offset}", user_id=user_id, accepted_time_ms=accepted_ms)
    return LoggedErasure(sent, LogPosition("t", 0, offset))


def test_an_event_counts_if_it_happened_since_the_last_erasure_of_its_user(tmp_path: Path) -> None:
    """The last erasure is in the ledger or still on its way there; other users' events of any time count."""
    ledger = ErasureLedger(tmp_path)
    ledger.append([erasure(1, "ann", 1_000), erasure(2, "bob", 1_000)], ["t"])
    waiting = [erasure(3, "bob", 2_000), erasure(4, "cy", 2_000)]
    events = [
        event(10 + number, user_id, time_ms)
        for number, (user_id, time_ms) in enumerate(
            (user_id, time_ms) for user_id in ("ann", "bob", "cy", "dee") for time_ms in (999, 1_000, 1_999, 2_000)
        )
    ]

    left = [
        (each.interaction.user_id, each.interaction.event_time_ms) for each in without_late(events, waiting, ledger)
    ]

    assert [time_ms for user_id, time_ms in left if user_id == "ann"] == [1_000, 1_999, 2_000]
    assert [time_ms for user_id, time_ms in left if user_id in ("bob", "cy")] == [2_000, 2_000]
    assert [time_ms for user_id, time_ms in left if user_id == "dee"] == [999, 1_000, 1_999, 2_000]
