"""A user's features at request time: the frozen types between the feature store and the data plane."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.contracts.tenant import local, tenant_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecomputedList:
    """The list that the offline pipeline stored for a user.

    `made_from_row_us` is the time (Unix µs) of the user's row that the list was made from, as `UserFeatures.as_of_us`.
    `item_ids` and `scores` have equal length, best first. `made_at_s` is when it was made (Unix seconds), if the store
    knows.
    """

    item_ids: tuple[str, ...]
    scores: tuple[float, ...]
    bundle_version: str
    made_from_row_us: int
    made_at_s: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UserFeatures:
    """One user's features from one read. `history_item_ids` run oldest to newest; empty for an unknown user.

    `disliked_item_ids` are never shown, even if seen items are. `shown` maps items to the number of impressions since
    the user last acted on them, and `shown_times_s` to the time of the last (Unix s); the store remembers a bounded
    number of recently shown items. `as_of_us` (Unix µs) is the time of the row, which rises with each change: the
    offline features as of then are equal.
    """

    history_item_ids: tuple[str, ...] = ()
    newest_event_time_ms: int | None = None
    num_events: int = 0
    as_of_us: int | None = None
    precomputed: PrecomputedList | None = None
    disliked_item_ids: tuple[str, ...] = ()
    shown: Mapping[str, int] = field(default_factory=dict)
    shown_times_s: Mapping[str, int] = field(default_factory=dict)

    @property
    def history_digest(self) -> str:
        """A short hash of the history, which compares offline features with served features."""
        return history_digest(self.history_item_ids)


def history_digest(item_ids: tuple[str, ...]) -> str:
    """Hash a history (oldest to newest) to 16 hex digits."""
    return hashlib.blake2b("\x1f".join(item_ids).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class RecentPopularity:
    """Popular items, best first: with users per hour over all windows, and with users in each window by its name."""

    weights: Sequence[tuple[str, float]] = ()
    windows: Mapping[str, Sequence[tuple[str, float]]] = field(default_factory=dict)

    def of(self, tenant: str) -> "RecentPopularity":
        """Return a tenant's items, under the ids that its bundles have."""
        return RecentPopularity(
            _items_of(tenant, self.weights), {name: _items_of(tenant, items) for name, items in self.windows.items()}
        )


def _items_of(tenant: str, items: Sequence[tuple[str, float]]) -> Sequence[tuple[str, float]]:
    return [(local(item_id), score) for item_id, score in items if tenant_of(item_id) == tenant]
