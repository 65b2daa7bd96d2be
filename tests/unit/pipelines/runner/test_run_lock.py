"""Only one pipeline at a time works in a folder."""

import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from pipelines.runner.run_lock import run_lock, run_lock_if_free

HOLDER = """
import sys
from pathlib import Path
from pipelines.runner.run_lock import run_lock_if_free
with run_lock_if_free(Path(sys.argv[1])) as is_free:
    print(is_free, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the folder's lock until its input ends."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "pipeline")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        yield process
        process.kill()


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_another_process_holds_the_lock_until_it_ends(tmp_path: Path, holder: subprocess.Popen[str], end: str) -> None:
    """The lock is denied while the other process holds it, and granted after that process ends, also by SIGKILL."""
    with run_lock_if_free(tmp_path / "pipeline") as is_free:
        assert not is_free

    if end == "kill":
        holder.kill()
    holder.communicate()

    with run_lock_if_free(tmp_path / "pipeline") as is_free:
        assert is_free


def test_a_waiting_run_prints_that_and_gets_the_lock(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    """The console names the folder, and work begins when the other run has ended."""

    class Ends(io.StringIO):
        """Ends the other run once the wait is announced."""

        def write(self, words: str) -> int:
            """Write, and release the lock after the announcement."""
            if "waiting" in words:
                holder.communicate()
            return super().write(words)

    console = Console(file=Ends(), width=160)

    with run_lock(tmp_path / "pipeline", console), run_lock_if_free(tmp_path / "pipeline") as is_free:
        assert not is_free  # held by this process

    assert isinstance(console.file, Ends)
    assert str(tmp_path / "pipeline") in console.file.getvalue().replace("\n", "")
