"""A stop cancels a periodic task, and an error does not end it. The tests of its users cover the repetition."""

import asyncio
import tomllib
from pathlib import Path

from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from services.gateway.followed_file import FileState, FollowedFile
from services.gateway.periodic_task import PeriodicTask
from tests.support.wait import until


def num_failures(task: str) -> float:
    """Return the number of errors of a task that this process counted."""
    return REGISTRY.get_sample_value("tailrace_background_failures_total", {"task": task}) or 0.0


def replace(path: Path, content: bytes) -> None:
    """Replace a file atomically: a file written in place is empty for a moment."""
    scratch = path.with_suffix(".new")
    scratch.write_bytes(content)
    scratch.replace(path)


async def test_a_stop_cancels_running_work() -> None:
    """A stop does not wait for running work, and a task that was never started can be stopped."""
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        """Never end."""
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    task = PeriodicTask("test", work, 0.0, at_once=True)
    await task.stop()
    task.start()
    await begun.wait()
    await task.stop()

    assert cancelled.is_set()


async def test_work_that_waits_for_an_event_runs_once_for_each() -> None:
    """Without the event the task sleeps."""
    wanted, num_runs = asyncio.Event(), 0

    async def work() -> None:
        nonlocal num_runs
        num_runs += 1

    task = PeriodicTask("test", work, 0.0, when=wanted)
    task.start()
    for expected in (1, 2):
        wanted.set()
        await until(lambda expected=expected: num_runs == expected)
        for _ in range(20):
            await asyncio.sleep(0)
    await task.stop()

    assert num_runs == 2


async def test_an_unexpected_error_is_logged_once_and_counted_and_the_task_goes_on(tmp_path: Path) -> None:
    """The first of equal failures is logged with its traceback, each is counted, and the task continues."""
    path = tmp_path / "numbers"
    read: list[str] = []

    async def work() -> None:
        read.append(path.read_text(encoding="utf-8"))

    before = num_failures("numbers")
    task = PeriodicTask("numbers", work, 0.0, at_once=True)
    replace(path, b"\xff")
    with capture_logs() as logs:
        task.start()
        await until(lambda: num_failures("numbers") >= before + 3)
        replace(path, b"1")
        await until(lambda: read)
        replace(path, b"\xff")
        await until(lambda: len(logs) > 1)
        await task.stop()

    assert set(read) == {"1"}
    assert [(line["event"], line["task"], type(line["exc_info"])) for line in logs] == [
        ("background_task_failed", "numbers", UnicodeDecodeError)
    ] * 2


async def test_a_followed_file_is_read_again_after_an_error_of_its_reader(tmp_path: Path) -> None:
    """After an unexpected error of the reader, the old content stays, the state is outdated, and polling continues."""
    path = tmp_path / "settings.toml"
    path.write_text("k = 1")
    states: list[FileState] = []
    file = FollowedFile(path, "settings", lambda path: tomllib.loads(path.read_text()), {}, on_state=states.append)
    await file.start()
    with capture_logs() as logs:
        replace(path, b"k =")
        await until(lambda: num_failures("settings") >= 2)
        kept = file.in_force
        replace(path, b"k = 1")
        await until(lambda: states[-1] is FileState.CURRENT)
        replace(path, b"k = 2")
        await until(lambda: file.in_force == {"k": 2})
    await file.stop()

    assert kept == {"k": 1}
    assert states[:3] == [FileState.CURRENT, FileState.OUTDATED, FileState.CURRENT]
    assert [line["event"] for line in logs if line["log_level"] == "error"] == ["background_task_failed"]
