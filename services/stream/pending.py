"""What was applied since the last checkpoint: events that are not in the offline log yet, and offsets to commit. Pure."""

from collections import defaultdict
from collections.abc import Sequence

from services.stream.decode import LoggedInteraction, Record


class Pending:
    """Owned by the worker; emptied by each checkpoint."""

    def __init__(self) -> None:
        self.by_partition: dict[int, list[LoggedInteraction]] = defaultdict(list)
        self.next_offsets: dict[int, int] = {}

    @property
    def num_events(self) -> int:
        """How many events wait for the offline log."""
        return sum(len(events) for events in self.by_partition.values())

    def add(self, records: Sequence[Record], events: Sequence[LoggedInteraction]) -> None:
        """Take in one applied batch: all its records count for the offsets, its readable events for the log."""
        for record in records:
            self.next_offsets[record.position.partition] = record.position.offset + 1
        for event in events:
            self.by_partition[event.position.partition].append(event)

    def clear(self) -> None:
        """Forget what is now logged and committed."""
        self.by_partition.clear()
        self.next_offsets.clear()
