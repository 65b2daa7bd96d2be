"""Wait for a condition with a deadline: `wait_for` in a thread, `until` and `until_answer` in an event loop."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

Answer = TypeVar("Answer")


def wait_for(condition: Callable[[], Any], timeout_s: float = 60.0, what: str = "condition") -> Any:
    """Poll until the condition holds and return its value. Raises AssertionError after the timeout."""
    give_up = time.monotonic() + timeout_s
    while time.monotonic() < give_up:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"{what}: not within {timeout_s} s")


async def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Poll until the condition holds. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - the condition is outside of this event loop's control
            await asyncio.sleep(0.005)


async def until_answer(
    ask: Callable[[], Awaitable[Answer]],
    is_good: Callable[[Answer], object] = bool,
    timeout_s: float = 60.0,
    passing: type[Exception] | tuple[type[Exception], ...] = (),
) -> Answer:
    """Ask until the answer is good, and return it; retries errors of the `passing` kinds. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while True:
            with suppress(passing):
                if is_good(answer := await ask()):
                    return answer
            await asyncio.sleep(0.01)
