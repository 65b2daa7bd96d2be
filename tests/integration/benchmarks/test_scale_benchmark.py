"""`python -m benchmarks.scale` in its short form: real store, broker and worker."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.grid


def test_points_are_measured_on_real_servers_and_within_their_time(tmp_path: Path) -> None:
    """One point of the users' and the catalogue's axis has all its fields; a point that takes too long is null and stops its servers."""
    command = [sys.executable, "-m", "benchmarks.scale", "--sizes", "1000", "--seconds", "1", "--json"]

    def rows(name: str, *options: str) -> list[dict[str, float]]:
        subprocess.run([*command, str(tmp_path / name), *options], check=True, timeout=300)
        found: list[dict[str, float]] = json.loads((tmp_path / name).read_text())["rows"]
        return found

    users, catalogue = rows("both.json", "--axis", "users", "catalogue")
    (late,) = rows("late.json", "--axis", "catalogue", "--limit-s", "0.5")

    measured = [{name for name, value in row.items() if value is not None} for row in (users, catalogue, late)]
    point = {"axis", "size"}
    assert measured == [
        point | {"p99_ms", "loop_ms", "rss_mb", "restart_s"},
        point | {"loop_ms", "rss_mb", "freshness_p99_ms", "restart_s"},
        point,
    ]
