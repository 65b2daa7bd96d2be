"""Rules and alerts, checked by promtool."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.pages import ROOT

PROMETHEUS = ROOT / "infra/prometheus"
DRILLS = sorted((PROMETHEUS / "tests").glob("*.yaml"))
SAMPLE = {"operations", "objectives-15s", "objectives-7200s"}
pytestmark = [
    pytest.mark.skipif(
        shutil.which("promtool") is None, reason="promtool is not here: apt-get install prometheus, or PATH to one"
    ),
]


def promtool(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["promtool", *arguments], capture_output=True, text=True, check=False, cwd=PROMETHEUS, timeout=280
    )


@pytest.mark.parametrize("name", ["prometheus.yml", "local.yml"])
def test_the_configuration_is_valid(name: str) -> None:
    """promtool accepts the configuration and finds the rules."""
    done = promtool("check", "config", name)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 rule files" in done.stdout


@pytest.mark.parametrize("path", sorted((PROMETHEUS / "rules").glob("*.yaml")), ids=lambda path: path.stem)
def test_rules_are_valid(path: Path) -> None:
    """promtool finds neither syntax errors nor duplicates."""
    done = promtool("check", "rules", "--lint-fatal", str(path))

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[] if path.stem in SAMPLE else pytest.mark.grid) for path in DRILLS],
)
def test_alerts_fire_when_they_should_and_only_then(path: Path) -> None:
    """Each alert fires within two minutes of a 14.4-fold burn and in each window, not at .9, and on missing data."""
    done = promtool("test", "rules", str(path))

    assert done.returncode == 0, done.stdout + done.stderr
