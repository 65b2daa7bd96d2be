"""The users and histories that the console shows: user ids from the feature store, and histories with titles.

Knows no store: its ports are arguments. Event times are known only if the offline tables are on this machine.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from models.catalogue import Catalogue
from services.contracts.features import UserFeatures
from services.gateway.request.context import Features
from services.gateway.request.live_bundle import Live

MAX_SHOWN = 60
_TIMEOUT_S = 0.5
_SAMPLED_PER_USER = 4


class UserDirectory(Features, Protocol):
    """The feature store, as the console uses it."""

    async def sample_user_ids(self, limit: int, timeout_s: float) -> list[str]:
        """Return some user ids from the store; may contain duplicates. Raises DependencyUnavailable."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedUser:
    """One user to choose from."""

    user_id: str
    num_events: int
    has_stored_list: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryItem:
    """One item of a history. `event_time_ms` is Unix time, None if unknown."""

    item_id: str
    title: str
    categories: tuple[str, ...]
    event_time_ms: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """A user's history, newest first, at most MAX_SHOWN items. `num_events` counts all events."""

    user_id: str
    num_events: int
    newest_event_time_ms: int | None
    has_stored_list: bool
    items: tuple[HistoryItem, ...]


EventTimes = Callable[[str], Mapping[int, int]]
"""Returns the Unix ms of a user's nth event by n (from 1), where known. May block."""


async def choose_users(directory: UserDirectory, bundle_version: str, limit: int) -> list[ListedUser]:
    """Return some known users. Raises DependencyUnavailable."""
    user_ids = await directory.sample_user_ids(_SAMPLED_PER_USER * limit, _TIMEOUT_S)
    # a Redis scan may return a key again while the table grows
    users = [
        _listed(user_id, await directory.read(user_id, bundle_version, _TIMEOUT_S))
        for user_id in dict.fromkeys(user_ids)
    ]
    return spread(users, limit)


def spread(users: Sequence[ListedUser], limit: int) -> list[ListedUser]:
    """Return at most `limit` users, from the longest history to the shortest, if possible a third with stored lists."""
    ordered = sorted(users, key=lambda user: (-user.num_events, user.user_id))
    with_list = _evenly([user for user in ordered if user.has_stored_list], limit // 3)
    others = _evenly([user for user in ordered if user not in with_list], limit - len(with_list))
    return sorted((*with_list, *others), key=ordered.index)


async def read_history(directory: UserDirectory, user_id: str, live: Live, event_times: EventTimes) -> History:
    """Return a user's history with titles. Raises DependencyUnavailable."""
    features = await directory.read(user_id, live.lists_version, _TIMEOUT_S)
    times = await asyncio.to_thread(event_times, user_id) if features.history_item_ids else {}
    return History(
        user_id=user_id,
        num_events=features.num_events,
        newest_event_time_ms=features.newest_event_time_ms,
        has_stored_list=features.precomputed is not None,
        items=_history_items(features, live.catalogue, times),
    )


def _evenly(ordered: Sequence[ListedUser], limit: int) -> list[ListedUser]:
    """Return evenly spaced users, including the first and the last."""
    if len(ordered) <= limit:
        return list(ordered)
    step = (len(ordered) - 1) / max(1, limit - 1)
    return [ordered[round(index * step)] for index in range(limit)]


def _listed(user_id: str, features: UserFeatures) -> ListedUser:
    return ListedUser(user_id=user_id, num_events=features.num_events, has_stored_list=features.precomputed is not None)


def _history_items(features: UserFeatures, catalogue: Catalogue, times: Mapping[int, int]) -> tuple[HistoryItem, ...]:
    """Return the newest items. The last item of a history is the user's `num_events`-th event."""
    newest_first: Sequence[str] = features.history_item_ids[::-1][:MAX_SHOWN]
    return tuple(
        _history_item(
            item_id, catalogue, features.newest_event_time_ms if back == 0 else times.get(features.num_events - back)
        )
        for back, item_id in enumerate(newest_first)
    )


def _history_item(item_id: str, catalogue: Catalogue, event_time_ms: int | None) -> HistoryItem:
    index = catalogue.index_of.get(item_id)
    if index is None:
        return HistoryItem(item_id=item_id, title=item_id, categories=(), event_time_ms=event_time_ms)
    return HistoryItem(
        item_id=item_id,
        title=catalogue.titles[index],
        categories=catalogue.categories[index],
        event_time_ms=event_time_ms,
    )
