"""Work in the background is done again and again, begins when it is to, and ends when it is told."""

import asyncio

import pytest

from services.gateway.periodic_task import PeriodicTask
from tests.support.wait import until


class Work:
    """Counts how often it is done; `error` is raised, `hangs` never ends."""

    def __init__(self) -> None:
        self.num_done = 0
        self.error: Exception | None = None
        self.hangs = False
        self.was_cancelled = False

    async def __call__(self) -> None:
        """Do it once."""
        self.num_done += 1
        if self.error is not None:
            raise self.error
        if self.hangs:
            try:
                await asyncio.Event().wait()
            finally:
                self.was_cancelled = True


async def test_it_is_done_until_it_is_stopped() -> None:
    """Again and again, and never after the stop."""
    work = Work()
    repeating = PeriodicTask(work, 0.0)

    repeating.start()
    await until(lambda: work.num_done > 2)
    await repeating.stop()
    num_done = work.num_done
    await asyncio.sleep(0)

    assert work.num_done == num_done


@pytest.mark.parametrize(("at_once", "num_done"), [(True, 1), (False, 0)])
async def test_it_begins_with_the_work_or_with_a_pause(at_once: bool, num_done: int) -> None:
    """Whoever has done the work once before begins with the pause."""
    work = Work()
    repeating = PeriodicTask(work, 3_600.0, at_once=at_once)

    repeating.start()
    for _ in range(3):
        await asyncio.sleep(0)
    await repeating.stop()

    assert work.num_done == num_done


async def test_a_stop_waits_for_nothing() -> None:
    """Work that is under way is cancelled, and what was never started is stopped already."""
    work = Work()
    work.hangs = True
    repeating = PeriodicTask(work, 0.0, at_once=True)

    await repeating.stop()
    repeating.start()
    await until(lambda: work.num_done)
    await repeating.stop()

    assert work.was_cancelled


async def test_an_error_ends_it_and_is_told_at_the_stop() -> None:
    """Work that may fail minds its errors itself."""
    work = Work()
    work.error = ZeroDivisionError()
    repeating = PeriodicTask(work, 0.0, at_once=True)

    repeating.start()
    await until(lambda: work.num_done)

    with pytest.raises(ZeroDivisionError):
        await repeating.stop()
    assert work.num_done == 1
