"""A periodic task is cancelled by a stop and ended by an error. That it repeats its work is held by the tests of those who use it."""

import asyncio

import pytest

from services.gateway.periodic_task import PeriodicTask


async def test_a_stop_cancels_running_work() -> None:
    """A stop does not wait for the work to end, and a task that was never started can be stopped."""
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    task = PeriodicTask(work, 0.0, at_once=True)
    await task.stop()
    task.start()
    await begun.wait()
    await task.stop()

    assert cancelled.is_set()


async def test_an_error_ends_the_task_and_is_raised_by_the_stop() -> None:
    """An error of the work is not swallowed."""
    begun = asyncio.Event()

    async def work() -> None:
        assert not begun.is_set()
        begun.set()
        raise ZeroDivisionError

    task = PeriodicTask(work, 0.0, at_once=True)
    task.start()
    await begun.wait()

    with pytest.raises(ZeroDivisionError):
        await task.stop()
