"""The stack's record and lock."""

import fcntl
import os
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import IO

import pytest

from infra.local.supervisor.leftovers import end_leftovers, find_leftovers
from infra.local.supervisor.stackfile import MARK, StackFile
from services.errors import EnvironmentFault
from tests.support.servers import free_port

ROOT = Path(__file__).resolve().parents[4]


def test_one_folder_has_one_supervisor(tmp_path: Path) -> None:
    """A second claim of a folder fails with the fix; another folder is free."""
    first = StackFile(tmp_path / "a")
    first.claim()

    with pytest.raises(EnvironmentFault, match="tailrace down"):
        StackFile(tmp_path / "a").claim()

    second = StackFile(tmp_path / "b")
    second.claim()
    assert StackFile(tmp_path / "a").is_claimed()
    for stack_file in (first, second):
        stack_file.release()
    assert not StackFile(tmp_path / "a").is_claimed()


def test_a_claim_waits_for_a_look_at_the_lock(tmp_path: Path) -> None:
    """A process that asks whether a stack runs, as `tailrace status` does, holds a shared lock for a moment."""
    stack_file = StackFile(tmp_path)
    stack_file.claim()
    stack_file.release()
    with ThreadPoolExecutor(1) as thread, (tmp_path / "run" / "lock").open() as look:
        fcntl.flock(look, fcntl.LOCK_SH)
        claim = thread.submit(stack_file.claim)
        wait((claim,), 0.1)
        fcntl.flock(look, fcntl.LOCK_UN)
        claim.result()

    assert stack_file.is_claimed()
    stack_file.release()


def test_a_child_holds_the_lock_from_its_first_moment(tmp_path: Path) -> None:
    """A spawned supervisor has lock and record before its own claim, and its children do not keep the lock."""
    child_of = f"""
        import subprocess, sys, time
        from pathlib import Path
        from infra.local.supervisor.stackfile import StackFile

        while not Path({str(tmp_path / "go")!r}).exists():
            time.sleep(0.01)
        sys.stdout.write("begun\\n")
        sys.stdout.flush()
        StackFile(Path({str(tmp_path)!r})).claim()
        print(subprocess.Popen(["sleep", "1000"], start_new_session=True, stdout=subprocess.DEVNULL).pid, flush=True)
    """

    def spawn(lock: IO[str]) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(child_of)], cwd=ROOT, stdin=lock, stdout=subprocess.PIPE
        )

    stack_file = StackFile(tmp_path)
    child = stack_file.claim_for(spawn)
    assert child.stdout is not None
    with child.stdout as output:
        record = stack_file.read()
        assert stack_file.is_claimed(), "before the child has run"
        assert record is not None
        assert (record.supervisor_pid, record.stage) == (child.pid, "starting")
        with pytest.raises(EnvironmentFault, match="already runs"):
            StackFile(tmp_path).claim_for(spawn)
        (tmp_path / "go").touch()
        assert output.readline() == b"begun\n"
        grandchild = int(output.readline())
        assert child.wait() == 0
    try:
        assert not stack_file.is_claimed(), "its child lives on, without the lock"
    finally:
        os.kill(grandchild, signal.SIGKILL)


def test_a_refusal_names_an_offline_command_that_runs_the_store(tmp_path: Path) -> None:
    """If an offline command runs the store, the error says to wait, because `tailrace down` would end a training."""
    port = free_port()
    beside = f"""
        from pathlib import Path
        from infra.local.store import feature_store
        from infra.local.supervisor.stackfile import StackFile
        from services.settings.settings import Settings

        with feature_store(Settings(state_dir=Path({str(tmp_path)!r}), redis_port={port}), print):
            print(StackFile(Path({str(tmp_path)!r})).taken())
    """

    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(beside)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    assert "another offline command (pid " in done.stdout
    assert "wait until it ends" in done.stdout


def test_leftovers_are_found_by_mark_and_process_group(tmp_path: Path) -> None:
    """Only processes with this folder's mark and their process groups are found."""
    unmarked = "env -i sleep 1000 & echo $!; wait"
    ours = subprocess.Popen(
        ["sh", "-c", unmarked], env={MARK: str(tmp_path)}, process_group=0, stdout=subprocess.PIPE, text=True
    )
    other = subprocess.Popen(["sleep", "1000"], env={MARK: str(tmp_path / "other")}, process_group=0)
    try:
        assert ours.stdout is not None
        child_pid = int(ours.stdout.readline())
        pids = {process.pid for process in find_leftovers(tmp_path)}
        end_leftovers(tmp_path)

        assert pids == {ours.pid, child_pid}
        assert find_leftovers(tmp_path) == []
        assert other.poll() is None
    finally:
        for process in (ours, other):
            process.kill()
            process.wait()
        assert ours.stdout is not None
        ours.stdout.close()
