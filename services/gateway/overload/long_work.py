"""Runs work that would block the event loop in a few threads.

Few, since each thread that runs Python delays the loop.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import ParamSpec, TypeVar

from services.errors import DeadlineExceeded

P = ParamSpec("P")
T = TypeVar("T")

SHORT_BYTES = 16_384
"""Parsing a body up to this size takes a few milliseconds at most."""


class LongWork:
    """Runs work of one kind, first come, first served. `stage` names it in errors."""

    def __init__(self, stage: str, num_threads: int = 1) -> None:
        self._stage = stage
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=stage)

    async def run(self, timeout_s: float | None, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of the work, or raise its error.

        Raises DeadlineExceeded; work that has not begun by then is dropped.
        """
        in_context = partial(copy_context().run, work, *args, **kwargs)
        running = asyncio.get_running_loop().run_in_executor(self._threads, in_context)
        try:
            return await asyncio.wait_for(running, timeout_s)
        except TimeoutError as error:
            raise DeadlineExceeded(self._stage) from error

    async def run_if(self, is_long: bool, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of the work, which runs in the event loop unless `is_long`."""
        return await self.run(None, work, *args, **kwargs) if is_long else work(*args, **kwargs)

    async def read(self, body: bytes, parse: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return a parser's result, in a thread if the body is large."""
        return await self.run_if(len(body) > SHORT_BYTES, parse, *args, **kwargs)
