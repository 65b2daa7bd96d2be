"""Starting, stopping and crashing the whole stack, beside the shared one."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.local.servers.ray_home import ray_home
from infra.local.supervisor.keeper import children_of
from infra.local.supervisor.leftovers import find_leftovers
from tests.support.stack import Stack, survivors
from tests.support.wait import wait_for

MAX_STOP_S = 10.0


@pytest.fixture
def second(stack: Stack, tmp_path: Path) -> Iterator[Stack]:
    """A second stack in its own folder, with the first one's bundle; not started."""
    shutil.copytree(stack.settings.bundle_root, tmp_path / "state" / "bundles")
    other = Stack(tmp_path / "state")
    yield other
    other.close()


def test_two_stacks_live_side_by_side(stack: Stack, second: Stack) -> None:
    """A stack with a bundle starts beside another one, and neither sees the other's clicks."""
    second.start()
    user_id = "side-by-side"
    second.sees_click(user_id, "50")

    assert stack.known(user_id)["reason"] == "unknown_user"
    processes = second.processes()
    began = time.monotonic()
    assert second.command("down").returncode == 0
    assert time.monotonic() - began < MAX_STOP_S
    assert second.reap() == 0
    assert survivors(processes) == []
    assert find_leftovers(second.settings.state_dir) == []
    assert not ray_home(second.settings.state_dir).exists()
    assert stack.is_healthy()


def test_ctrl_c_leaves_nothing(second: Stack) -> None:
    """SIGINT stops everything within seconds, and the data stay for the next start."""
    second.start()
    seen = second.sees_click("comes-back", "50")

    processes = second.processes()
    began = time.monotonic()
    os.kill(second.supervisor_pid, signal.SIGINT)

    assert second.reap() == 0
    assert time.monotonic() - began < MAX_STOP_S
    assert survivors(processes) == []
    assert list((second.settings.state_dir / "logs" / "ray").glob("worker-*.err"))
    second.start()
    assert second.known("comes-back")["newest_event_time_ms"] == seen["newest_event_time_ms"]


def test_a_killed_supervisor_leaves_nothing(second: Stack) -> None:
    """SIGKILL of the supervisor ends every process."""
    second.start()
    processes = second.processes()

    os.kill(second.supervisor_pid, signal.SIGKILL)
    second.reap()

    wait_for(lambda: not survivors(processes), 15.0, "the end of every process")
    assert find_leftovers(second.settings.state_dir) == []
    assert second.command("status").returncode == 1


def test_a_start_that_cannot_succeed_is_refused(second: Stack, stack: Stack) -> None:
    """Nothing is started when a port is taken, or a second time in one folder."""
    taken = Stack(second.settings.state_dir)
    taken.settings = taken.settings.model_copy(update={"redis_port": stack.settings.redis_port})

    refused, again = taken.command("up"), stack.command("up")
    taken.rest.close()

    assert (refused.returncode, again.returncode) == (1, 1)
    assert "tailrace down" in again.stderr
    assert f"port {stack.settings.redis_port} is taken" in refused.stderr
    assert "TAILRACE_REDIS_PORT" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert find_leftovers(second.settings.state_dir) == []


def test_down_ends_what_a_killed_supervisor_and_keeper_left(second: Stack) -> None:
    """`tailrace down` finds the processes that are left by their mark."""
    second.start()
    processes = second.processes()
    keepers = children_of(second.supervisor_pid)

    for pid in [second.supervisor_pid, *keepers]:
        os.kill(pid, signal.SIGSTOP)
    for pid in [*keepers, second.supervisor_pid]:
        os.kill(pid, signal.SIGKILL)
    second.reap()
    swept = second.command("down")
    wait_for(lambda: not survivors(processes), 15.0, "the end of every process")

    assert swept.returncode == 0
    assert survivors(processes) == []
    assert find_leftovers(second.settings.state_dir) == []
