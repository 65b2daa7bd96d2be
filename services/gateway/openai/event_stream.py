"""Server-sent events over HTTP, and callers who go away: whatever is under way for them is cancelled at once.

Starlette notices a caller who left only when the next chunk is sent; a text may not have one for seconds. Here the connection
is watched beside the work. Knows no text.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE = "data: [DONE]\n\n"


def sse(plain: Mapping[str, Any]) -> str:
    """Write one event."""
    return f"data: {json.dumps(plain, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def unless_gone(http: Request, work: Coroutine[Any, Any, T]) -> T:
    """Do the work while the caller is there; otherwise cancel it and raise ClientDisconnect. The body must be read before."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(http.receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        await _end(working, gone)


class EventStream(StreamingResponse):
    """A stream of events that ends, and closes where they come from, when the caller goes away."""

    def __init__(self, events: AsyncGenerator[str, None], source: AsyncGenerator[Any, None]) -> None:
        """Take the events and what they are made of, which must be closed even when no event was asked for."""
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._events = events
        self._source = source

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end, or until the caller is gone."""
        sending = asyncio.ensure_future(self.stream_response(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _end(sending, gone)
            await self._events.aclose()
            await self._source.aclose()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel what still runs, and wait until it is over; a connection that broke while sending is no news."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
