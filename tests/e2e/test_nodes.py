"""A cluster of several nodes in network namespaces of this machine, started by the operator's command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.faults.nodes.layout import why_not
from tests.support.stacks.stack import ROOT, Stack

pytestmark = pytest.mark.grid  # tests/integration/doors/test_edge_nodes.py holds the edge's part on two processes


def test_each_node_answers_through_the_edge_and_nothing_is_left(stack: Stack, tmp_path: Path) -> None:
    """A cluster of a head and two nodes answers requests on each node; its namespaces end with it."""
    if reason := why_not():
        pytest.skip(reason)
    before = namespaces()
    report, state = tmp_path / "nodes.json", str(stack.settings.state_dir)

    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.faults", "--nodes", "3", "--fault", "none", "--rate", "5"),
            *("--state", state, "--json", str(report), "--logs", str(tmp_path / "logs")),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    measured = json.loads(report.read_text())
    assert sorted(measured["answered_by_node"]) == ["node1", "node2"]
    assert min(measured["answered_by_node"].values()) > 0
    (row,) = measured["rows"]
    assert row["availability"] > 0.99  # two clusters on two cores may refuse one
    assert row["events"]["lost"] == 0
    assert namespaces() == before


def namespaces() -> set[str]:
    """Return the names of this machine's network namespaces."""
    folder = Path("/run/netns")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()
