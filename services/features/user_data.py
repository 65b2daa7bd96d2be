"""Reads all data of one user in Redis, for the user's own request. Blocks; never on a recommendation's path."""

from collections.abc import Iterable
from typing import Any

from services.contracts.explanation import whose
from services.features.explanations import each_explanation
from services.features.layout import RowLayout
from services.features.redis_calls import redis_as_dependency
from services.features.repo import RepoAddress, project_of
from services.features.schema import (
    USER_HISTORY,
    USER_RECOMMENDATIONS,
    USER_SHOWN,
    PrecomputedRow,
    UserHistory,
    UserShown,
)


class UserStore:
    """Reads a user's rows. Every call raises DependencyUnavailable."""

    def __init__(self, address: RepoAddress) -> None:
        """Open the store without connecting. Raises EnvironmentFault when no features were applied."""
        from services.settings.redis_clients import open_redis

        project = project_of(address)
        self._client = open_redis(address.redis, address.socket_timeout_s)
        self._histories = RowLayout(USER_HISTORY, project)
        self._shown = RowLayout(USER_SHOWN, project)
        self._lists = RowLayout(USER_RECOMMENDATIONS, project)

    def history(self, user_id: str) -> UserHistory | None:
        return self._histories.row(user_id, self._cells(self._histories, user_id))

    def shown(self, user_id: str) -> UserShown | None:
        """Return a user's remembered impressions."""
        return self._shown.row(user_id, self._cells(self._shown, user_id))

    def lists(self, user_id: str, versions: Iterable[str]) -> list[PrecomputedRow]:
        """Return the lists that these bundles have stored for a user."""
        rows = []
        for version in versions:
            with redis_as_dependency():
                cells = self._client.hmget(self._lists.key(user_id, version), self._lists.fields)
            if any(cell is not None for cell in cells):
                names = [column.name for column in USER_RECOMMENDATIONS.features]
                values = self._lists.values(names, cells)
                keys = {"user_id": [user_id], "bundle_version": [version]}
                rows += USER_RECOMMENDATIONS.from_columns(keys | {name: [value] for name, value in values.items()})
        return rows

    def explanations(self, user_id: str) -> list[bytes]:
        with redis_as_dependency():
            return [record for _, _, record in each_explanation(self._client) if whose(record)[0] == user_id]

    def _cells(self, layout: RowLayout[Any], user_id: str) -> Any:
        with redis_as_dependency():
            return self._client.hmget(layout.key(user_id), layout.fields)
