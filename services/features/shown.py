"""Users' impressions, in the hash of their history. The worker of impressions writes them under its topic's fence.

The worker of interactions writes them too, when a user acts on an item. So each writes only if the lists are as it has
read them.
"""

import socket
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from services.features.layout import RowLayout
from services.features.ownership import IMPRESSIONS_KEY, Partitions, PartitionWrite, RowWrite
from services.features.redis_calls import redis_as_dependency
from services.features.repo import RepoAddress, project_of
from services.features.schema import USER_SHOWN, LogPosition, UserShown

SHOWN_LISTS = ("shown_item_ids", "shown_counts", "shown_times_s")
ShownChange = tuple[UserShown, UserShown]
"""A row as it was read, and its replacement."""
_NO_TIME_US = 0


def without_items(shown: UserShown, item_ids: Collection[str]) -> UserShown:
    """Return the impressions without these items."""
    left = [index for index, item_id in enumerate(shown.item_ids) if item_id not in item_ids]
    return chosen(shown, left)


def chosen(shown: UserShown, places: Sequence[int]) -> UserShown:
    return UserShown(
        user_id=shown.user_id,
        item_ids=tuple(shown.item_ids[index] for index in places),
        counts=tuple(shown.counts[index] for index in places),
        times_s=tuple(shown.times_s[index] for index in places),
        position=shown.position,
    )


def read_shown(client: Any, layout: RowLayout[UserShown], user_ids: Sequence[str]) -> dict[str, UserShown]:
    """Read rows in one exchange; users without a row are absent. Raises DependencyUnavailable."""
    if not user_ids:
        return {}
    with redis_as_dependency():
        pipe = client.pipeline(transaction=False)
        for user_id in user_ids:
            pipe.hmget(layout.key(user_id), layout.fields)
        return layout.rows(user_ids, pipe.execute())


def shown_write(layout: RowLayout[UserShown], row: UserShown, before: UserShown | None) -> RowWrite:
    """Return the write of a row, conditional on the lists of `before` in the store; None: on an absent row."""
    names = SHOWN_LISTS if before is None else (*SHOWN_LISTS, "shown_offset")
    seen = dict.fromkeys(layout.fields_of(names), b"") if before is None else layout.some(before, names)
    return RowWrite(layout.key(row.user_id), layout.cells(row, _NO_TIME_US), expected=seen)


class ShownWriter:
    """Writes the rows of owned partitions of impressions. Used from one thread."""

    def __init__(self, address: RepoAddress, owner: str = "") -> None:
        """Open the store without connecting. `owner` names this process for display.

        Raises EnvironmentFault when no features were applied.
        """
        from services.settings.redis_clients import open_redis

        self._client = open_redis(address.redis, address.socket_timeout_s)
        self._layout = RowLayout(USER_SHOWN, project_of(address))
        self.partitions = Partitions(self._client, uuid.uuid4().hex, owner or socket.gethostname(), IMPRESSIONS_KEY)

    def read(self, user_ids: Sequence[str]) -> dict[str, UserShown]:
        """Read rows in one exchange; users without a row are absent. Raises DependencyUnavailable."""
        return read_shown(self._client, self._layout, user_ids)

    def apply(self, changed: Mapping[LogPosition, Sequence[UserShown]], before: Mapping[str, UserShown]) -> None:
        """Replace the rows read before, and record the log position that each partition's rows now hold.

        Raises OwnershipLost, RowChanged or DependencyUnavailable.
        """
        self.partitions.write_all(
            [
                PartitionWrite(
                    at.partition,
                    [shown_write(self._layout, row, before.get(row.user_id)) for row in rows],
                    position=at,
                )
                for at, rows in changed.items()
            ]
        )

    def close(self) -> None:
        """Release the owned partitions, and close the connections."""
        self.partitions.release()
        self._client.close()
