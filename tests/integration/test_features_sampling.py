"""Finding users who exist, in a real Valkey. Run: pytest tests/integration/test_features_sampling.py."""

import pytest

from services.errors import DependencyAway
from services.features.reader import FeatureReader
from services.features.repo import RepoAddress
from services.features.schema import LogPosition, PopularRow, PopularWindow, UserHistory
from services.features.writer import FeatureWriter
from tests.support.servers import Server

pytestmark = pytest.mark.integration
TIMEOUT_S = 2.0
NASTY = ("user*", "tail race", "ü[1]", "tailrace", "196")


def history(user_id: str) -> UserHistory:
    """Build a row of one event."""
    return UserHistory(
        user_id=user_id,
        item_ids=("a",),
        newest_event_time_ms=1_000,
        num_events=1,
        row_time_us=1_000_000,
        recent_event_ids=("e",),
        position=LogPosition("topic", 0, 1),
    )


async def test_users_are_found_by_their_keys(features: RepoAddress) -> None:
    """Every user's id comes back as it was written, whatever is in it, and no row of another kind comes along."""
    writer = FeatureWriter(features)
    writer.write_histories([history(user_id) for user_id in NASTY])
    windows = {name: PopularWindow(("a",), (1,)) for name in ("1h", "24h", "7d")}
    writer.write_popularity([PopularRow(partition=0, as_of_ms=1_000, windows=windows)])
    reader = FeatureReader(features, num_partitions=2)

    found = await reader.sample_user_ids(50, TIMEOUT_S)
    few = await reader.sample_user_ids(2, TIMEOUT_S)
    await reader.close()

    assert sorted(found) == sorted(NASTY)
    assert len(few) == 2


async def test_a_store_that_is_gone_is_said_to_be_away(features: RepoAddress, valkey: Server) -> None:
    """The same error as for a read."""
    reader = FeatureReader(features, num_partitions=2)
    valkey.kill()

    with pytest.raises(DependencyAway):
        await reader.sample_user_ids(5, TIMEOUT_S)
    await reader.close()
