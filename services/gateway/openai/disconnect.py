"""Work that goes on while its caller is there, and is cancelled at once when the caller goes away.

Starlette notices a caller who left only when the next chunk is sent; a text may not have one for seconds. Here the connection
is watched beside the work. Knows HTTP only as a connection that can end.
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, Generic, Self, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

T = TypeVar("T")


async def unless_gone(http: Request, work: Coroutine[Any, Any, T]) -> T:
    """Do the work while the caller is there; otherwise cancel it and raise ClientDisconnect. The body must be read before."""
    working = asyncio.ensure_future(work)
    try:
        await _done_or_gone(http, working, None)
        return working.result()
    finally:
        await end(working)


class Source(Generic[T]):
    """What a stream is made of, item by item. The first is asked for at once, and can be waited for apart. Must be closed."""

    def __init__(self, items: AsyncGenerator[T, None]) -> None:
        self._items = items
        self._first = asyncio.ensure_future(anext(items))
        self._is_begun = False

    async def wait(self, http: Request, patience_s: float) -> None:
        """Wait until the first item is there or patience is over. Raises what making it raised, and ClientDisconnect.

        What raises is closed.
        """
        try:
            await _done_or_gone(http, self._first, patience_s)
            if self._first.done():
                self._first.result()
        except BaseException:
            await self.aclose()
            raise

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        if self._is_begun:
            return await anext(self._items)
        self._is_begun = True
        return await self._first

    async def aclose(self) -> None:
        """Close where the items come from, whether one is waited for or not."""
        await end(self._first)
        await self._items.aclose()


async def gone(receive: Receive) -> None:
    """Wait until the caller goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def end(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel what still runs, and wait until it is over; how it ended is no news."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _done_or_gone(http: Request, working: "asyncio.Future[Any]", timeout_s: float | None) -> None:
    """Wait for the work, at most so long. Raises ClientDisconnect when the caller goes first."""
    leaving = asyncio.ensure_future(gone(http.receive))
    try:
        await asyncio.wait({working, leaving}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if leaving.done() and not working.done():
            raise ClientDisconnect
    finally:
        await end(leaving)
