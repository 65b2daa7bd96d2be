"""Writes features in batches, and reads back the rows that are about to change. For the stream worker and the pipeline.

The store drops a row whose event timestamp is older than or equal to the stored one, and that check is not atomic: rows of one entity
must come from one writer at a time, with rising times. Nothing is retried here: DependencyAway goes to the caller, and a repeated write
is harmless.
"""

from collections.abc import Collection, Sequence
from typing import Any

from services.features.redis_calls import redis_as_dependency
from services.features.repo import RepoAddress, open_store
from services.features.schema import (
    BUNDLE_VERSION,
    POPULARITY,
    USER_HISTORY,
    USER_ID,
    USER_RECOMMENDATIONS,
    PopularRow,
    PrecomputedRow,
    UserHistory,
    ViewSchema,
)

_KEYS_PER_SCAN = 1_000


class FeatureWriter:
    """Writes the feature store. Used from one thread."""

    def __init__(self, address: RepoAddress) -> None:
        """Open the store; no connection is made yet. Raises EnvironmentFault when no features were applied."""
        self._store = open_store(address)

    def read_histories(self, user_ids: Sequence[str]) -> dict[str, UserHistory]:
        """Read these users' rows in one exchange; users without a row are absent. Raises DependencyAway."""
        if not user_ids:
            return {}
        entities = {USER_HISTORY.key.name: list(user_ids)}
        with redis_as_dependency():
            table = self._store.get_online_features(USER_HISTORY.references, entities).to_dict()
        return {row.user_id: row for row in USER_HISTORY.from_columns(table)}

    def write_histories(self, rows: Sequence[UserHistory]) -> None:
        """Write these rows, one per user, in one exchange. Raises DependencyAway; then some may have been written."""
        self._write(USER_HISTORY, rows, [row.row_time_us for row in rows])

    def write_popularity(self, rows: Sequence[PopularRow]) -> None:
        """Write partitions' popularity windows. Raises DependencyAway."""
        self._write(POPULARITY, rows, [row.as_of_ms * 1_000 for row in rows])

    def write_precomputed(self, rows: Sequence[PrecomputedRow], made_at_us: int) -> None:
        """Store lists made at this time (Unix µs): a later one of a user and bundle replaces the earlier. Raises DependencyAway."""
        self._write(USER_RECOMMENDATIONS, rows, [made_at_us] * len(rows))

    def remove_precomputed(self, kept_versions: Collection[str]) -> int:
        """Remove the lists that other bundles than these made, and return their number. Raises DependencyAway.

        Relies on how Feast writes a key: the entities' names, then their values, then the project.
        """
        from feast.infra.key_encoding_utils import serialize_entity_key_prefix

        online: Any = self._store.provider.online_store
        prefix = serialize_entity_key_prefix([USER_ID.name, BUNDLE_VERSION.name], entity_key_serialization_version=3)
        num_removed = 0
        with redis_as_dependency():
            client = online._get_client(self._store.config.online_store)  # Feast has no public way to it
            for key in client.scan_iter(match=prefix + b"*", count=_KEYS_PER_SCAN):
                if _list_version(key, self._store.project) not in kept_versions:
                    num_removed += client.unlink(key)
        return num_removed

    def _write(self, view: ViewSchema[Any], rows: Sequence[Any], times_us: list[int]) -> None:
        """Write rows of a view, each with its event timestamp (Unix µs). Raises DependencyAway.

        Feast's `push` does the same after it has read all views from its registry anew, which takes twice as long as writing.
        """
        import pandas as pd

        if not rows:
            return
        frame = pd.DataFrame(
            {**view.to_columns(rows), "event_timestamp": pd.to_datetime(times_us, unit="us", utc=True)}
        )
        with redis_as_dependency():
            self._store.write_to_online_store(view.name, frame)


def _list_version(key: bytes, project: str) -> str:
    """Return the bundle version in the key of a list."""
    from feast.infra.key_encoding_utils import deserialize_entity_key

    entity: Any = deserialize_entity_key(key.removesuffix(project.encode()))
    version: str = entity.entity_values[list(entity.join_keys).index(BUNDLE_VERSION.name)].string_val
    return version
