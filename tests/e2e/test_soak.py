"""The soak's short form, on a separate stack: all load at once, then an evaluation."""

from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.faults.scene import SceneKind, scene_from
from benchmarks.soak.run import SETTINGS, Plan, soak
from tests.support.engine.checkpoints import write_checkpoint
from tests.support.stacks.stack import Stack

pytestmark = pytest.mark.grid
PLAN = Plan(
    total_s=80, rate_rps=12, faults=("store-hang", "gateway-killed", "worker-killed"), every_s=13, seed=1
)  # too short to judge growth


async def test_faults_come_and_go_under_mixed_load(stack: Stack, tmp_path: Path) -> None:
    """No acknowledged event is lost or doubled, each request has an answer or a named error, and all parts recover."""
    given = {**SETTINGS, "text_path": str(write_checkpoint(tmp_path / "tiny"))}
    async with scene_from(stack.settings.state_dir, None, SceneKind.WIRED, **given) as scene:
        report = await soak(scene, PLAN, Console(stderr=True))

    assert [row for row in report["promises"] if not row["is_kept"]] == []
    assert sorted(fault["fault"] for fault in report["faults"]) == sorted(PLAN.faults)
    assert report["events"]["num_acknowledged"] > 100
    assert {row["row"].split(" over ")[1] for row in report["doors"]} == {"REST", "gRPC", "OpenAI"}
