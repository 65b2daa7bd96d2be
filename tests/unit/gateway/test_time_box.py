"""A time box ends in time whatever its work does, and hands back values only."""

import asyncio
import time

import pytest

from services.gateway.request.time_box import Settled, time_box
from tests.support.until import until

LATE: Settled[int] = Settled()


async def test_a_value_comes_back() -> None:
    """The plain case."""

    async def work() -> int:
        """The work."""
        return 7

    settled = await time_box(work(), 1.0)

    assert settled == Settled(value=7)


@pytest.mark.parametrize("error", [ValueError("x"), asyncio.CancelledError()])
async def test_an_error_comes_back_as_a_value(error: BaseException) -> None:
    """Even the work's own cancellation."""

    async def work() -> int:
        """The work."""
        raise error

    settled = await time_box(work(), 1.0)

    assert isinstance(settled.error, type(error))


async def test_work_that_takes_too_long_is_cancelled() -> None:
    """Late means neither value nor error."""
    was_cancelled = False

    async def work() -> int:
        """The work."""
        nonlocal was_cancelled
        try:
            await asyncio.sleep(3_600)
        except asyncio.CancelledError:
            was_cancelled = True
            raise
        return 7

    settled = await time_box(work(), 0.01)
    await asyncio.sleep(0)

    assert settled == LATE
    assert was_cancelled


async def test_work_that_ignores_its_cancellation_is_left_behind() -> None:
    """The box does not wait for it."""
    let_go = asyncio.Event()

    async def work() -> int:
        """The work."""
        while not let_go.is_set():
            try:
                await let_go.wait()
            except asyncio.CancelledError:
                continue
        return 7

    started_s = time.monotonic()
    settled = await time_box(work(), 0.01)
    took_s = time.monotonic() - started_s
    let_go.set()
    await asyncio.sleep(0)

    assert settled == LATE
    assert took_s < 5


async def test_a_caller_who_is_cancelled_takes_the_work_along() -> None:
    """Nothing stays behind."""
    tasks: list[asyncio.Task[None] | None] = []

    async def work() -> int:
        """The work."""
        tasks.append(asyncio.current_task())
        await asyncio.sleep(3_600)
        return 7

    box = asyncio.create_task(time_box(work(), 3_600))
    await until(lambda: tasks)
    box.cancel()
    await asyncio.wait({box, *filter(None, tasks)}, timeout=5)

    assert all(task is not None and task.cancelled() for task in tasks)


@pytest.mark.parametrize("timeout_s", [0.0, -1.0])
async def test_no_time_at_all_is_late_at_once(timeout_s: float) -> None:
    """Negative times too."""
    assert await time_box(asyncio.sleep(3_600, 7), timeout_s) == LATE
