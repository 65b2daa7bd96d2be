"""The keeper ends every process of its command."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

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
"""A command with a child in its own session and an orphaned grandchild."""


def pids_of_family(pids_path: Path) -> list[int]:
    """Wait until a family has started, and return its pids."""
    wait_for(lambda: pids_path.exists() and pids_path.read_text().endswith(" "))
    return [int(pid) for pid in pids_path.read_text().split()]


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_keeper_exits_as_its_command_does() -> None:
    """The exit code is the command's, 128 plus its signal number, or 127 with the name of a missing binary."""
    commands = [("sh", "-c", script) for script in ("exit 0", "exit 7", "kill -9 $$")]
    ended = [
        subprocess.run(keeper_command(os.getpid(), 1.0, command), check=False, capture_output=True, text=True)
        for command in [*commands, ("/no/such/server",)]
    ]

    assert [process.returncode for process in ended] == [0, 7, 137, 127]
    assert "/no/such/server" in ended[-1].stderr


@pytest.mark.parametrize(
    ("victim", "number", "code"), [("keeper", signal.SIGTERM, 143), ("command", signal.SIGKILL, 137)]
)
def test_the_end_of_a_keeper_or_its_command_ends_the_whole_family(
    tmp_path: Path, victim: str, number: int, code: int
) -> None:
    """All processes of the command end before the keeper, including sessions and orphans."""
    command = (sys.executable, "-c", FAMILY, str(tmp_path / "pids"))
    keeper = subprocess.Popen(keeper_command(os.getpid(), 5.0, command), start_new_session=True)
    pids = pids_of_family(tmp_path / "pids")

    os.kill(keeper.pid if victim == "keeper" else pids[0], number)

    assert keeper.wait(timeout=60) == code
    assert all(is_gone(pid) for pid in pids)


def test_a_command_is_killed_after_its_grace() -> None:
    """A command that ignores SIGTERM is killed after the grace period."""
    script = ("sh", "-c", "trap '' TERM; echo ready; while true; do sleep 0.05; done")
    keeper = subprocess.Popen(keeper_command(os.getpid(), 0.2, script), stdout=subprocess.PIPE)
    assert keeper.stdout is not None
    keeper.stdout.readline()

    keeper.terminate()

    assert keeper.wait(timeout=60) == 137
    keeper.stdout.close()


def test_the_death_of_the_parent_ends_the_family(tmp_path: Path) -> None:
    """After SIGKILL of the keeper's parent, no process of the family remains."""
    parent_script = (
        "import os, subprocess, sys, time; from infra.local.supervisor.keeper import keeper_command; "
        "subprocess.Popen(keeper_command(os.getpid(), 1.0, tuple(sys.argv[1:])), start_new_session=True); "
        "time.sleep(1000)"
    )
    command = (sys.executable, "-c", FAMILY, str(tmp_path / "pids"))
    parent = subprocess.Popen([sys.executable, "-c", parent_script, *command])
    pids = pids_of_family(tmp_path / "pids")
    keepers = children_of(parent.pid)

    parent.kill()
    parent.wait()

    wait_for(lambda: all(is_gone(pid) for pid in [*keepers, *pids]), what="the end of the family")
