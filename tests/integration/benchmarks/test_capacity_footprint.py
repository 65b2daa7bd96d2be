"""The bytes of a real store by kind of row."""

from dataclasses import replace

from benchmarks.capacity.footprint import store_bytes
from services.features.repo import RepoAddress
from services.features.schema import PrecomputedRow
from services.features.writer import FeatureWriter
from tests.support.gateway.rows import history_row


def test_histories_and_lists_are_measured_apart_and_whole(features: RepoAddress) -> None:
    """A list has a key of its own, and every field of a row counts, also where few are large."""
    writer = FeatureWriter(features)
    writer.write_histories([replace(history_row("u", ("a", "b")), item_ids=("x" * 50_000,))])
    writer.write_precomputed(
        [
            PrecomputedRow(user_id=user, item_ids=("a",), scores=(1.0,), bundle_version="v1", made_from_row_us=1)
            for user in "uv"
        ],
        1_000_000,
    )
    writer.close()

    by_kind = store_bytes(features.redis)["by_kind"]

    assert (by_kind["history"]["rows"], by_kind["list"]["rows"]) == (1, 2)
    assert 50_000 < by_kind["history"]["mean_bytes"] < 60_000
    assert by_kind["list"]["mean_bytes"] < 1_000
