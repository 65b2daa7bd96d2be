"""Server-sent events over HTTP. The caller's leaving ends them; silence is filled with comments.

Proxies end a connection on which nothing moves, so a stream that has nothing to say for a while sends a comment, which clients
ignore. Knows no text.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from services.gateway.openai.disconnect import Source, end, gone

DONE = "data: [DONE]\n\n"
_COMMENT: Message = {"type": "http.response.body", "body": b": keep-alive\n\n", "more_body": True}


def sse(plain: Mapping[str, Any]) -> str:
    """Write one event."""
    return f"data: {json.dumps(plain, ensure_ascii=False, separators=(',', ':'))}\n\n"


class EventStream(StreamingResponse):
    """A stream of events that ends, and closes where they come from, when the caller goes away."""

    def __init__(self, events: AsyncGenerator[str, None], source: Source[Any], silence_s: float) -> None:
        """Take the events and what they are made of, which must be closed even when no event was asked for."""
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._events = events
        self._source = source
        self._silence_s = silence_s

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end, or until the caller is gone."""
        line = _Line(send)
        sending = asyncio.ensure_future(self.stream_response(line.send))
        leaving = asyncio.ensure_future(gone(receive))
        filling = asyncio.ensure_future(line.fill(self._silence_s))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end(sending, leaving, filling)
            await self._events.aclose()
            await self._source.aclose()


class _Line:
    """The way to the caller, and when something was last said on it."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._clock = asyncio.get_running_loop().time
        self._last_s = self._clock()
        self._is_free = False
        """Whether the head is out, the end is not, and nobody is sending."""

    async def send(self, message: Message) -> None:
        """Say something."""
        self._is_free = False
        await self._send(message)
        self._last_s = self._clock()
        self._is_free = message.get("more_body", True)

    async def fill(self, silence_s: float) -> None:
        """Say a comment whenever nothing was said for so long. Never ends."""
        while True:
            await asyncio.sleep(self._last_s + silence_s - self._clock())
            if self._clock() < self._last_s + silence_s:
                continue
            if self._is_free:
                await self.send(_COMMENT)
            else:
                self._last_s = self._clock()
