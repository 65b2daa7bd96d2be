"""A few user ids that the online store really holds, found by their keys' prefix. For people who look, never for requests.

Leans on how Feast writes a key: the entity's name, then its value, then the project.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from feast import FeatureStore

_JOIN_KEY = "user_id"
_KEYS_PER_SCAN = 500
_MAX_SCANS = 20


async def sample_user_ids(store: "FeatureStore", limit: int) -> list[str]:
    """Return at most `limit` user ids, looking at ten thousand keys at most. Raises Redis' errors."""
    from feast.infra.key_encoding_utils import serialize_entity_key_prefix

    online: Any = store.provider.online_store
    client = await online._get_client_async(store.config.online_store)  # there is no public way to it
    prefix = serialize_entity_key_prefix([_JOIN_KEY], entity_key_serialization_version=3)
    user_ids: list[str] = []
    cursor = 0
    for _ in range(_MAX_SCANS):
        cursor, keys = await client.scan(cursor, match=prefix + b"*", count=_KEYS_PER_SCAN)
        user_ids += [_user_id(key, store.project) for key in keys]
        if cursor == 0 or len(user_ids) >= limit:
            break
    return user_ids[:limit]


def _user_id(key: bytes, project: str) -> str:
    from feast.infra.key_encoding_utils import deserialize_entity_key

    entity: Any = deserialize_entity_key(key.removesuffix(project.encode()))
    user_id: str = entity.entity_values[0].string_val
    return user_id
