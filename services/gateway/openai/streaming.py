"""Server-sent events over HTTP, and work that is cancelled when its client disconnects. Knows no text.

Starlette notices a disconnect only when the next chunk is sent, which may take seconds for a text; this module watches
the connection during the work. Proxies close idle connections, so an idle stream sends comments, which clients ignore.
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, Generic, Self, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from services.gateway.call.http import json_text

T = TypeVar("T")

DONE = "data: [DONE]\n\n"
_KEEP_ALIVE: Message = {"type": "http.response.body", "body": b": keep-alive\n\n", "more_body": True}


def sse(data: Mapping[str, Any]) -> str:
    """Return one server-sent event. Raises ValueError for NaN and infinity."""
    return f"data: {json_text(data)}\n\n"


async def unless_disconnected(http: Request, work: Coroutine[Any, Any, T]) -> T:
    """Do the work; if the client disconnects first, cancel it and raise ClientDisconnect.

    The body must have been read.
    """
    working = asyncio.ensure_future(work)
    try:
        await _wait_or_disconnect(http, working, None)
        return working.result()
    finally:
        await _cancel(working)


class PrefetchedStream(Generic[T]):
    """An async iterator whose first item is computed at once and can be awaited separately. Must be closed."""

    def __init__(self, items: AsyncGenerator[T, None]) -> None:
        self._items = items
        self._first = asyncio.ensure_future(anext(items))
        self._is_first_taken = False

    async def wait_first(self, http: Request, timeout_s: float) -> None:
        """Wait at most `timeout_s` for the first item. Raises its error or ClientDisconnect, after closing."""
        try:
            await _wait_or_disconnect(http, self._first, timeout_s)
            if self._first.done():
                self._first.result()
        except BaseException:
            await self.aclose()
            raise

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        if self._is_first_taken:
            return await anext(self._items)
        self._is_first_taken = True
        return await self._first

    async def aclose(self) -> None:
        """Close the underlying iterator, whether or not an item is being computed."""
        await _cancel(self._first)
        await self._items.aclose()


class EventStream(StreamingResponse):
    """A stream of server-sent events that ends, and closes its source, when the client disconnects."""

    def __init__(self, events: AsyncGenerator[str, None], source: PrefetchedStream[Any], silence_s: float) -> None:
        """`source` produces the events and must be closed even if no event is read."""
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._events = events
        self._source = source
        self._silence_s = silence_s

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end or the client's disconnect."""
        connection = _KeptAlive(send)
        sending = asyncio.ensure_future(self.stream_response(connection.send))
        disconnecting = asyncio.ensure_future(_disconnect(receive))
        filling = asyncio.ensure_future(connection.fill_silence(self._silence_s))
        try:
            await asyncio.wait({sending, disconnecting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel(sending, disconnecting, filling)
            await self._events.aclose()
            await self._source.aclose()


class _KeptAlive:
    """The connection to the client, and the time of the last message on it."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._clock = asyncio.get_running_loop().time
        self._last_s = self._clock()
        self._may_comment = False
        """Whether the response has started and not ended, and no message is being sent."""

    async def send(self, message: Message) -> None:
        """Send a message."""
        self._may_comment = False
        await self._send(message)
        self._last_s = self._clock()
        self._may_comment = message.get("more_body", True)

    async def fill_silence(self, silence_s: float) -> None:
        """Send a comment after every `silence_s` of silence. Never returns."""
        while True:
            await asyncio.sleep(self._last_s + silence_s - self._clock())
            if self._clock() < self._last_s + silence_s:
                continue
            if self._may_comment:
                await self.send(_KEEP_ALIVE)
            else:
                self._last_s = self._clock()


async def _wait_or_disconnect(http: Request, working: "asyncio.Future[Any]", timeout_s: float | None) -> None:
    """Wait at most `timeout_s` for the work. Raises ClientDisconnect if the client disconnects first."""
    disconnecting = asyncio.ensure_future(_disconnect(http.receive))
    try:
        await asyncio.wait({working, disconnecting}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if disconnecting.done() and not working.done():
            raise ClientDisconnect
    finally:
        await _cancel(disconnecting)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel unfinished tasks and wait for their end; results and errors are dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
