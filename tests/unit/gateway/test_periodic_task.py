"""A periodic task repeats its work, starts with it or with a pause, and is cancelled by a stop."""

import asyncio

import pytest

from services.gateway.periodic_task import PeriodicTask
from tests.support.wait import until


class Work:
    """Counts its calls; `error` is raised, `hangs` never ends."""

    def __init__(self, error: Exception | None = None, hangs: bool = False) -> None:
        self.num_calls = 0
        self.error = error
        self.hangs = hangs
        self.was_cancelled = False

    async def __call__(self) -> None:
        """Do the work once."""
        self.num_calls += 1
        if self.error is not None:
            raise self.error
        if self.hangs:
            try:
                await asyncio.Event().wait()
            finally:
                self.was_cancelled = True


async def test_work_is_repeated_until_it_is_stopped() -> None:
    """The work is called again and again, and never after the stop."""
    work = Work()
    task = PeriodicTask(work, 0.0)

    task.start()
    await until(lambda: work.num_calls > 2)
    await task.stop()
    num_calls = work.num_calls
    await asyncio.sleep(0)

    assert work.num_calls == num_calls


async def test_a_stop_cancels_running_work() -> None:
    """A stop does not wait for the work to end, and a task that was never started can be stopped."""
    work = Work(hangs=True)
    task = PeriodicTask(work, 0.0, at_once=True)

    await task.stop()
    task.start()
    await until(lambda: work.num_calls)
    await task.stop()

    assert work.was_cancelled


async def test_an_error_ends_the_task_and_is_raised_by_the_stop() -> None:
    """An error of the work is not swallowed."""
    work = Work(error=ZeroDivisionError())
    task = PeriodicTask(work, 0.0, at_once=True)

    task.start()
    await until(lambda: work.num_calls)

    with pytest.raises(ZeroDivisionError):
        await task.stop()
    assert work.num_calls == 1
