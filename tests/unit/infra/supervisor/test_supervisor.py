"""Faults that the supervisor survives: `pytest tests/unit/infra/supervisor/test_supervisor.py`.

Each case runs in an interpreter of its own, because a supervisor ends all processes below it.
"""

import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from infra.local.commands.down import stop_stack
from infra.local.supervisor.stackfile import StackFile, StackRecord
from services.settings.settings import Settings, inherited_environment
from tests.support.wait import wait_for

ROOT = Path(__file__).resolve().parents[4]
STATEMENTS = """
    import os, shutil, signal, sys, time
    from pathlib import Path
    from infra.local.supervisor.keeper import children_of
    from infra.local.supervisor.parts import Part
    from infra.local.supervisor.stackfile import StackFile
    from infra.local.supervisor.supervisor import Supervisor

    folder = Path(sys.argv[1])
    logs, stack_file, said = folder / "logs", StackFile(folder), []
    logs.mkdir()
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


def run(case: str, folder: Path) -> str:
    """Run a case after the statements above, stop, and return the remaining processes. Raises AssertionError when it fails."""
    script = textwrap.dedent(STATEMENTS) + textwrap.dedent(case) + "\none.stop()\nprint(children_of(os.getpid()))\n"
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_record_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    """A part that dies while its record cannot be written is restarted all the same, and all end in order."""
    left = run(
        """
        shutil.rmtree(folder / "run")
        os.kill(keeper, signal.SIGKILL)
        until("the record cannot be written")
        until("worker: healthy again (restart 1)")
        """,
        tmp_path,
    )

    assert left == "[]"


def test_a_part_that_cannot_be_started_is_tried_again(tmp_path: Path) -> None:
    """A log that cannot be opened is a failure of that part alone."""
    left = run(
        """
        logs.rename(folder / "away")
        os.kill(keeper, signal.SIGKILL)
        until("worker: cannot be started")
        (folder / "away").rename(logs)
        until("worker: healthy again")
        """,
        tmp_path,
    )

    assert left == "[]"


def test_an_old_record_ends_no_other_process(tmp_path: Path) -> None:
    """A supervisor writes its own pid at its start, so that `tailrace down` never ends a process with an old record's pid."""
    stranger = subprocess.Popen(["sleep", "1000"])
    try:
        old = StackFile(tmp_path)
        old.claim()
        old.write(StackRecord(supervisor_pid=stranger.pid, stage="ready"))
        old.release()
        script = "import sys, time, pathlib; from infra.local.supervisor.stackfile import StackFile; s = StackFile(pathlib.Path(sys.argv[1])); s.claim(); time.sleep(1000)"
        beginning = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT)
        wait_for(StackFile(tmp_path).is_claimed, 30.0, "a claim")
        wait_for(
            lambda: (record := StackFile(tmp_path).read()) and record.supervisor_pid == beginning.pid, 10.0, "a record"
        )

        stopped = stop_stack(Settings(state_dir=tmp_path))

        assert stopped
        assert beginning.wait(10.0) == -signal.SIGTERM
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_supervisor_that_has_removed_its_record_is_waited_for(tmp_path: Path) -> None:
    """`tailrace down` while a stack ends by itself: its record goes before its lock, which is no broken record."""
    script = "import sys, time, pathlib; from infra.local.supervisor.stackfile import StackFile; s = StackFile(pathlib.Path(sys.argv[1])); s.claim(); s.forget(); sys.stdin.read()"
    ending = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, stdin=subprocess.PIPE)
    try:
        wait_for(StackFile(tmp_path).is_claimed, 30.0, "a claim")
        wait_for(lambda: StackFile(tmp_path).read() is None, 10.0, "no record")
        end = threading.Timer(0.5, ending.communicate)
        end.start()

        assert stop_stack(Settings(state_dir=tmp_path))
        end.join()
    finally:
        ending.kill()
        ending.wait()


@pytest.mark.parametrize(("command", "stops"), [("", True), ("nohup", False)])
def test_a_closed_terminal_stops_the_stack_unless_under_nohup(tmp_path: Path, command: str, stops: bool) -> None:
    """SIGHUP stops the stack, but stays ignored where the parent ignores it."""
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
