"""`python -m benchmarks.scale` in its short form over a real store, broker and worker, and sizes of rows."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.load.footprint import store_bytes
from services.features.repo import RepoAddress
from services.features.schema import PrecomputedRow
from services.features.writer import FeatureWriter
from tests.support.gateway.rows import history_row


@pytest.mark.grid
def test_points_are_measured_on_real_servers_and_within_their_time(tmp_path: Path) -> None:
    """A point on either axis has all its fields; a point that times out is null and stops its servers."""
    command = [sys.executable, "-m", "benchmarks.scale", "--sizes", "1000", "--seconds", "1", "--json"]

    def rows(name: str, *options: str) -> list[dict[str, float]]:
        subprocess.run([*command, str(tmp_path / name), *options], check=True, timeout=300)
        measured_rows: list[dict[str, float]] = json.loads((tmp_path / name).read_text())["rows"]
        return measured_rows

    users, catalogue = rows("both.json", "--axis", "users", "catalogue")
    (late,) = rows("late.json", "--axis", "catalogue", "--limit-s", "0.5")

    measured = [{name for name, value in row.items() if value is not None} for row in (users, catalogue, late)]
    point = {"axis", "size"}
    assert measured == [
        point | {"p99_ms", "loop_ms", "rss_mb", "restart_s"},
        point | {"loop_ms", "rss_mb", "freshness_p99_ms", "restart_s"},
        point,
    ]


def test_histories_and_lists_are_measured_apart_and_whole(features: RepoAddress) -> None:
    """A list has its own key, and every field of a row counts, even if few are large."""
    listed = {"item_ids": ("a",), "scores": (1.0,), "bundle_version": "v1", "made_from_row_us": 1}
    writer = FeatureWriter(features)
    writer.write_histories([replace(history_row("u", ("a", "b")), item_ids=("x" * 50_000,))])
    writer.write_precomputed([PrecomputedRow(user_id=user, **listed) for user in "uv"], 1_000_000)
    writer.close()

    by_kind = store_bytes(features.redis)["by_kind"]

    assert (by_kind["history"]["rows"], by_kind["list"]["rows"]) == (1, 2)
    assert 50_000 < by_kind["history"]["mean_bytes"] < 60_000
    assert by_kind["list"]["mean_bytes"] < 1_000
