"""Faults that the supervisor survives, each in its own interpreter: a supervisor ends all its child processes."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from infra.local.commands import down
from infra.local.commands.down import stop_stack
from infra.local.commands.up import spawn_stack
from infra.local.supervisor.stackfile import StackFile, StackRecord
from services.settings.settings import Settings, inherited_environment
from tests.support.wait import wait_for

ROOT = Path(__file__).resolve().parents[4]
STATEMENTS = """
    import os, shutil, signal, sys, time
    from pathlib import Path
    from infra.local.supervisor.keeper import children_of
    from infra.local.supervisor.part import Part
    from infra.local.supervisor.stackfile import StackFile
    from infra.local.supervisor.supervisor import Supervisor

    folder = Path(sys.argv[1])
    logs, stack_file, said = folder / "logs", StackFile(folder), []
    logs.mkdir()
    os.chdir(folder)
    stack_file.claim()
    part = Part(name="worker", command=("sleep", "1000"))
    one = Supervisor(
        environment=os.environ, log_dir=logs, stack_file=stack_file, supervisor_pid=os.getpid(), report=said.append,
        stop_requested=lambda: False,
    )
    one.bring_up((part,))
    (keeper,) = children_of(os.getpid())

    def until(words):
        while not any(words in line for line in said):
            one.tick()

"""


@pytest.mark.parametrize(
    "case",
    [
        """
        shutil.rmtree(folder / "run")
        (folder / "run").touch()
        os.kill(keeper, signal.SIGKILL)
        until("the record cannot be written")
        until("worker: healthy again (restart 1)")
        (folder / "run").unlink()
        """,
        """
        logs.rename(folder / "away")
        os.kill(keeper, signal.SIGKILL)
        until("worker: cannot be started")
        (folder / "away").rename(logs)
        until("worker: healthy again")
        """,
        """
        one.begin(Part(name="training", command=("sh", "-c", "until test -e ended; do sleep 0.01; done; exit 3")))
        os.kill(keeper, signal.SIGKILL)
        until("worker: healthy again (restart 1)")
        assert one.ended("training") is None
        Path("ended").touch()
        while (code := one.ended("training")) is None:
            one.tick()
        assert code == 3
        """,
    ],
    ids=["its record cannot be written", "its log cannot be opened", "another part ends by itself"],
)
def test_a_part_that_dies_is_restarted_though(case: str, tmp_path: Path) -> None:
    """A dead part is restarted even if its record or log cannot be written, and all processes end on stop."""
    script = textwrap.dedent(STATEMENTS) + textwrap.dedent(case) + "\none.stop()\nprint(children_of(os.getpid()))\n"
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )

    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_parts_share_the_processor_as_processes_of_one_session(tmp_path: Path) -> None:
    """Linux divides processor time among sessions before it regards niceness; signals of a terminal reach no part."""
    ours = "[os.getsid(keeper) == os.getsid(0), os.getpgid(keeper) == keeper, os.getpgrp() != keeper]"
    script = textwrap.dedent(STATEMENTS) + f"\nprint({ours})\none.stop()\n"
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )

    assert (done.returncode, done.stdout.strip()) == (0, "[True, True, True]"), done.stderr


@pytest.mark.parametrize("own_session", [True, False])
def test_a_background_stack_has_its_own_session_only_on_request(tmp_path: Path, own_session: bool) -> None:
    """In the caller's session, niceness applies between both; a terminal's signals reach no stack."""
    command = ("timeit", "-n", "1", "-r", "1", "import time; time.sleep(1000)")
    with spawn_stack(Settings(state_dir=tmp_path), command, own_session=own_session) as child:
        ids = os.getsid(child.pid), os.getpgid(child.pid)
        child.kill()

    assert ids == (child.pid if own_session else os.getsid(0), child.pid)


@contextmanager
def running(*command: str) -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def supervisor_that(statement: str, folder: Path) -> list[str]:
    """Return the command of a process that claims the folder and runs this statement."""
    script = f"""
        import pathlib, sys, time
        from infra.local.supervisor.stackfile import StackFile
        stack_file = StackFile(pathlib.Path(sys.argv[1]))
        stack_file.claim()
        {statement}
    """
    return [sys.executable, "-c", textwrap.dedent(script), str(folder)]


def test_an_old_record_ends_no_other_process(tmp_path: Path) -> None:
    """A supervisor records its own pid at startup, so `tailrace down` never ends the process of an old record."""
    with running("sleep", "1000") as stranger:
        old = StackFile(tmp_path)
        old.claim()
        old.write(StackRecord(supervisor_pid=stranger.pid, stage="ready"))
        old.release()
        with running(*supervisor_that("time.sleep(1000)", tmp_path)) as beginning:
            wait_for(
                lambda: (record := StackFile(tmp_path).read()) and record.supervisor_pid == beginning.pid,
                30.0,
                "a record",
            )
            stopped = stop_stack(Settings(state_dir=tmp_path))

            assert (stopped, beginning.wait(60.0), stranger.poll()) == (True, -signal.SIGTERM, None)


def test_a_supervisor_that_has_removed_its_record_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tailrace down` waits for a supervisor that has removed its record but still holds its lock."""
    stack_file = StackFile(tmp_path)
    with running(*supervisor_that("stack_file.forget(); sys.stdin.read()", tmp_path)) as ending:
        wait_for(lambda: stack_file.is_claimed() and stack_file.read() is None, 30.0, "a claim without a record")
        monkeypatch.setattr(down.time, "sleep", lambda _: ending.communicate())  # it ends at the first poll

        assert stop_stack(Settings(state_dir=tmp_path))
        assert ending.returncode == 0


@pytest.mark.parametrize(("command", "stops"), [("", True), ("nohup", False)])
def test_a_closed_terminal_stops_the_stack_unless_under_nohup(tmp_path: Path, command: str, stops: bool) -> None:
    """SIGHUP stops the stack, but stays ignored if the parent ignores it."""
    script = """
        import signal, sys
        from infra.local.commands.up import _watch_signals
        was_asked = _watch_signals()
        signal.raise_signal(signal.SIGHUP)
        sys.exit(0 if was_asked() else 3)
    """
    words = [*command.split(), sys.executable, "-c", textwrap.dedent(script)]

    done = subprocess.run(
        words,
        cwd=ROOT,
        env=inherited_environment(),
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )

    assert done.returncode == (0 if stops else 3)
