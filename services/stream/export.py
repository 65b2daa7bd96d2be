"""All data kept about one user, as plain values ready for JSON: from Redis and from the offline logs.

Blocks on disk and store.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from services.contracts.explanation import decode_explanation
from services.contracts.message import plain_of
from services.features.ownership import partition_of
from services.features.user_data import UserStore
from services.router.policy import Facts
from services.stream.log.kinds import IMPRESSIONS, INTERACTIONS, LogKind
from services.stream.log.offline_log import OfflineLog

_FACTS = tuple(field.name for field in fields(Facts))
_HISTORY = ("item_ids", "disliked_item_ids", "newest_event_time_ms", "num_events", "row_time_us")


class UserExport:
    """Reads one user's data."""

    def __init__(
        self, store: UserStore, offline_log_dir: Path, num_partitions: int, versions: Callable[[], Iterable[str]]
    ) -> None:
        """Take the store, the logs' folder, the number of partitions, and a lister of bundles with stored lists."""
        self._store = store
        self._offline_log_dir = offline_log_dir
        self._num_partitions = num_partitions
        self._versions = versions

    def __call__(self, user_id: str) -> dict[str, Any]:
        """Return history, lists, impressions, explanations, and the logs' events.

        Raises DependencyUnavailable or OSError. Logs are None if this process has no folder of them.
        """
        history, shown = self._store.history(user_id), self._store.shown(user_id)
        return {
            "user_id": user_id,
            "history": history and {name: getattr(history, name) for name in _HISTORY},
            "shown": [
                {"item_id": item_id, "count": count, "last_shown_time_s": last_s}
                for item_id, count, last_s in zip(shown.item_ids, shown.counts, shown.times_s, strict=True)
            ]
            if shown
            else [],
            "lists": [
                {"bundle_version": row.bundle_version, "item_ids": row.item_ids, "scores": row.scores}
                for row in self._store.lists(user_id, self._versions())
            ],
            "explanations": _explanations(self._store.explanations(user_id)),
            "events": self._logged(INTERACTIONS, user_id),
            "impressions": self._logged(IMPRESSIONS, user_id),
        }

    def _logged(self, kind: LogKind[Any], user_id: str) -> list[dict[str, Any]] | None:
        if not self._offline_log_dir.exists():
            return None
        log: OfflineLog[Any] = OfflineLog(self._offline_log_dir, kind=kind)
        events = log.read(partition_of(user_id, self._num_partitions), user_id=user_id)
        return [kind.to_row(event) for event in events]


def _explanations(stored: Sequence[bytes]) -> list[dict[str, Any]]:
    """Return the readable explanations: a gateway of another version may have written unreadable ones."""
    plain = []
    for record in stored:
        try:
            plain.append(plain_of(decode_explanation(record, _FACTS)))
        except (ValueError, TypeError):
            continue
    return plain
