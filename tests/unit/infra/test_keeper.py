"""The keeper leaves nothing behind: `pytest tests/unit/infra/test_keeper.py`."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from infra.local.supervisor.keeper import children_of, keeper_command
from tests.support.wait import wait_for

FAMILY = """
import os, subprocess, sys, time
own_session = subprocess.Popen(["sleep", "1000"], start_new_session=True)
orphan = subprocess.Popen(["sh", "-c", "sleep 1000 & echo $!"], stdout=subprocess.PIPE, text=True)
grandchild = orphan.stdout.readline().strip()
open(sys.argv[1], "w").write(f"{os.getpid()} {own_session.pid} {grandchild} ")
time.sleep(1000)
"""
"""A command with a child in a session of its own and a grandchild whose parent is gone."""


def start_family(pids_path: Path, grace_s: float = 5.0) -> tuple["subprocess.Popen[bytes]", list[int]]:
    """Start a family under a keeper; give the keeper and the pids of the family."""
    command = (sys.executable, "-c", FAMILY, str(pids_path))
    keeper = subprocess.Popen(keeper_command(os.getpid(), grace_s, command), start_new_session=True)
    wait_for(lambda: pids_path.exists() and pids_path.read_text().endswith(" "))
    return keeper, [int(pid) for pid in pids_path.read_text().split()]


def is_gone(pid: int) -> bool:
    """Whether a process has ended; a zombie has."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_keeper_ends_as_its_command_does() -> None:
    """The exit code is the command's; death by a signal is 128 plus its number."""
    codes = [
        subprocess.run(keeper_command(os.getpid(), 1.0, ("sh", "-c", script)), check=False).returncode
        for script in ("exit 0", "exit 7", "kill -9 $$")
    ]

    assert codes == [0, 7, 137]


def test_a_command_that_cannot_be_run_is_named() -> None:
    """A missing binary ends with code 127 and its name."""
    done = subprocess.run(
        keeper_command(os.getpid(), 1.0, ("/no/such/server",)), check=False, capture_output=True, text=True
    )

    assert done.returncode == 127
    assert "/no/such/server" in done.stderr


def test_stopping_a_keeper_ends_the_whole_family(tmp_path: Path) -> None:
    """SIGTERM to the keeper ends the command and all that it started, sessions and orphans included."""
    keeper, pids = start_family(tmp_path / "pids")

    keeper.terminate()
    keeper.wait(timeout=10)

    assert all(is_gone(pid) for pid in pids)


def test_the_death_of_the_command_ends_its_family(tmp_path: Path) -> None:
    """When the command is killed, what it leaves behind goes before the keeper does."""
    keeper, pids = start_family(tmp_path / "pids")

    os.kill(pids[0], signal.SIGKILL)

    assert keeper.wait(timeout=10) == 137
    assert all(is_gone(pid) for pid in pids)


def test_a_stubborn_command_is_killed_after_its_grace() -> None:
    """A command that ignores SIGTERM is killed when the grace is over."""
    script = ("sh", "-c", "trap '' TERM; echo ready; while true; do sleep 0.05; done")
    keeper = subprocess.Popen(keeper_command(os.getpid(), 0.2, script), stdout=subprocess.PIPE)
    assert keeper.stdout is not None
    keeper.stdout.readline()

    keeper.terminate()

    assert keeper.wait(timeout=10) == 137
    keeper.stdout.close()


def test_a_killed_parent_takes_the_family_along(tmp_path: Path) -> None:
    """SIGKILL of the keeper's parent, which can do nothing any more, leaves nothing behind."""
    pids_path = tmp_path / "pids"
    parent_script = (
        "import os, subprocess, sys, time; from infra.local.supervisor.keeper import keeper_command; "
        "subprocess.Popen(keeper_command(os.getpid(), 1.0, tuple(sys.argv[1:])), start_new_session=True); time.sleep(1000)"
    )
    command = (sys.executable, "-c", FAMILY, str(pids_path))
    parent = subprocess.Popen([sys.executable, "-c", parent_script, *command])
    wait_for(lambda: pids_path.exists() and pids_path.read_text().endswith(" "))
    pids = [int(pid) for pid in pids_path.read_text().split()]
    keepers = children_of(parent.pid)

    parent.kill()
    parent.wait()

    wait_for(lambda: all(is_gone(pid) for pid in [*keepers, *pids]), what="the end of the family")
