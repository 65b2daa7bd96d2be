"""Faults injected through the proxy on a separate stack, in small numbers."""

from collections.abc import AsyncIterator

import pytest

from benchmarks.faults.__main__ import run_row
from benchmarks.faults.kinds import FAULTS
from benchmarks.faults.rows import Phases
from benchmarks.faults.scene import Scene, SceneKind, scene_from
from tests.support.stacks.stack import Stack

pytestmark = pytest.mark.grid  # test_faults.py holds the same faults on the shared stack, without the proxies
PHASES = Phases(before_s=2, during_s=4, after_s=6)
RATE_RPS = 8.0


@pytest.fixture
async def scene(stack: Stack) -> AsyncIterator[Scene]:
    """A stack behind proxies, with a copy of the tests' state."""
    async with scene_from(stack.settings.state_dir, None, SceneKind.WIRED) as made:
        await made.until_healthy()
        yield made


async def test_faults_through_the_wire_and_a_spike(scene: Scene, stack: Stack) -> None:
    """Every request is answered, reasons name the unavailable dependency, and no acknowledged event is lost."""
    rows = {
        name: await run_row(name, scene, RATE_RPS, PHASES, FAULTS[name])
        for name in ("store-hang", "broker-stop", "low-priority-spike")
    }

    assert [row["availability"] for row in rows.values()] == [1, 1, 1]
    assert [row[sent]["lost"] for row in rows.values() for sent in ("events", "batches")] == [0] * 6
    assert [row[sent]["doubled"] for row in rows.values() for sent in ("events", "batches")] == [0] * 6
    assert "features_unavailable" in rows["store-hang"]["during"]["reasons"]
    assert rows["broker-stop"]["events"]["acknowledged"] < rows["broker-stop"]["events"]["sent"]
    assert rows["low-priority-spike"]["by_priority"]["low"]["num_requests"] == 12 * RATE_RPS * PHASES.during_s
    assert stack.is_healthy()


async def test_a_gateway_that_starts_without_states_of_items_shows_nothing_hidden(scene: Scene) -> None:
    """A gateway without broker and snapshot takes no request; other gateways show no hidden item and lose no event."""
    name = "gateway-without-states"
    row = await run_row(name, scene, RATE_RPS, PHASES, FAULTS[name])

    assert row["hidden"] == {"items": 3, "shown": 0}
    assert [row[sent][what] for sent in ("events", "batches") for what in ("lost", "doubled")] == [0] * 4
