"""The rows of the feature store as frozen types. Knows neither Feast nor Redis, so the pure aggregates can use them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LogPosition:
    """Where an event lies in the log. `topic_id` names this life of the topic: a topic made anew starts at offset 0 again."""

    topic_id: str
    partition: int
    offset: int

    def covers(self, other: "LogPosition") -> bool:
        """Say whether the event at `other` was applied when this position was the last one applied."""
        same_log = self.topic_id == other.topic_id and self.partition == other.partition
        return same_log and other.offset <= self.offset


@dataclass(frozen=True, slots=True, kw_only=True)
class UserHistory:
    """One user's row of the view user_history.

    `item_ids` run oldest to newest in order of arrival, cut to the newest ones. `row_time_us` (Unix µs) rises with each
    change of the row: it is the row's event timestamp, in the online store and offline. `num_events` counts the whole life.
    """

    user_id: str
    item_ids: tuple[str, ...]
    newest_event_time_ms: int
    num_events: int
    row_time_us: int
    recent_event_ids: tuple[str, ...]
    position: LogPosition


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecomputedRow:
    """One user's row of the view user_recommendations: items best first with as many scores."""

    user_id: str
    item_ids: tuple[str, ...]
    scores: tuple[float, ...]
    bundle_version: str
    watermark_ms: int


@dataclass(frozen=True, slots=True)
class PopularWindow:
    """The most frequent items of one sliding window with their counts, most frequent first."""

    item_ids: tuple[str, ...] = ()
    counts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PopularRow:
    """One log partition's row of the view popularity. `windows` maps a window's name (a key of WINDOW_MS) to its items."""

    partition: int
    as_of_ms: int
    windows: dict[str, PopularWindow]


WINDOW_MS = {"1h": 3_600_000, "24h": 24 * 3_600_000, "7d": 7 * 24 * 3_600_000}
