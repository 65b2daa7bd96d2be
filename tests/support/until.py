"""Waiting inside an event loop until something is so: polls, with a deadline."""

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Wait until the condition holds. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for is outside, and sets no event
            await asyncio.sleep(0.005)
