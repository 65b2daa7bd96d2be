"""Server-sent events as they come off the wire: the data of each, up to `[DONE]`. Knows no JSON.

A line ends with a line feed, a carriage return, or both, and with nothing else: what Unicode calls a line's end stands in JSON
as it is.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import httpx

from services.gateway.openai.remote_refusals import away

_DATA, _DONE = b"data:", b"[DONE]"
_END_S = 0.5
"""How long a server may take to close its answer after its last event, for its connection to serve again."""


async def data_of(answer: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Return the data of each event up to the end, and read on to the answer's end. Raises DependencyAway when the end never came."""
    async for line in _lines_of(answer):
        if line.startswith(_DATA):
            data = line[len(_DATA) :].strip()
            if data == _DONE:
                await _read_out(answer)
                return
            yield data
    raise away("it broke off before the end")


async def _lines_of(answer: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    begun = b""
    async for chunk in answer:
        *lines, begun = [*(begun + chunk).splitlines(keepends=True), b""]
        if lines and not lines[-1].endswith((b"\n", b"\r")):
            begun = lines.pop()
        for line in lines:
            yield line
    yield begun


async def _read_out(answer: AsyncIterator[bytes]) -> None:
    """Read what comes after the last event, which is nothing: then the connection is free. What fails now harms nobody."""
    with suppress(TimeoutError, httpx.HTTPError, httpx.StreamError):
        async with asyncio.timeout(_END_S):
            async for _ in answer:
                pass
