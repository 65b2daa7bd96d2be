"""Events from before the erasure of their user that arrive after it, such as those that an app sent late."""

from collections.abc import Iterable, Sequence

from services.stream.decode import LoggedErasure, LoggedInteraction
from services.stream.log.ledger import ErasureLedger


def without_late(
    events: Sequence[LoggedInteraction], erasures: Iterable[LoggedErasure], ledger: ErasureLedger
) -> list[LoggedInteraction]:
    """Return the events since the last erasure of their user. `erasures` are those that the ledger may lack.

    Raises OSError for an unreadable ledger.
    """
    since_ms = {logged.erasure.erased_id: logged.erasure.accepted_time_ms for logged in erasures}
    erased = {partition: ledger.erased(partition) for partition in {event.position.partition for event in events}}
    if any(erased.values()):
        for user_id, partition in {(event.interaction.user_id, event.position.partition) for event in events}:
            if (tombstone := erased[partition].of(user_id)) is not None:
                since_ms[user_id] = max(tombstone.accepted_time_ms, since_ms.get(user_id, 0))
    if not since_ms:
        return list(events)
    return [event for event in events if event.interaction.event_time_ms >= since_ms.get(event.interaction.user_id, 0)]
