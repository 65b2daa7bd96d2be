"""Carries the connections of one shared port to a server behind a Unix socket, byte for byte. Knows no protocol.

gRPC's server binds its own sockets, so ours is taken in here; REST goes the same way, so that both doors are alike.
"""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from infra.local.standby.shared_port import BACKLOG, SharedPort

_CHUNK_BYTES = 65_536
_ARRIVES_WITHIN_S = 0.1
_CONNECTS_WITHIN_S = 1.0


class Relay:
    """One door: what comes to the port goes to the socket at `path`."""

    def __init__(self, port: SharedPort, path: Path) -> None:
        self.port = port
        self._path = path
        self._arrived: dict[object, asyncio.Event] = {}
        self._carrying: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._begin, sock=self.port.socket, backlog=BACKLOG)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for connection in self._carrying:
            connection.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)

    async def is_reached(self) -> bool:
        """Whether a new connection comes here rather than to the other who listens. Sends nothing."""
        with self.port.socket.dup() as ours:
            address = ours.getsockname()
        try:
            opening = asyncio.open_connection(*address[:2])
            _, writer = await asyncio.wait_for(opening, _CONNECTS_WITHIN_S)
        except OSError:
            return False
        came = self._arrived.setdefault(writer.get_extra_info("sockname"), asyncio.Event())
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(came.wait(), _ARRIVES_WITHIN_S)
        finally:
            self._arrived.pop(writer.get_extra_info("sockname"), None)
            await _close(writer)
        return came.is_set()

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(self._carry(reader, writer))
        self._carrying.add(connection)
        connection.add_done_callback(self._carrying.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        self._arrived.setdefault(peer, asyncio.Event()).set()
        try:
            with suppress(OSError):
                await self._join(reader, writer)
        finally:
            self._arrived.pop(peer, None)
            await _close(writer)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Copy both ways until either end closes."""
        inner_reader, inner_writer = await asyncio.open_unix_connection(self._path)
        try:
            await _first_of(_copy(reader, inner_writer), _copy(inner_reader, writer))
        finally:
            await _close(inner_writer)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(_CHUNK_BYTES):
        writer.write(chunk)
        await writer.drain()


async def _first_of(*ways: Coroutine[Any, Any, None]) -> None:
    """Run these until one ends, however it ends, and end the others."""
    running = [asyncio.create_task(way) for way in ways]
    try:
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in running:
            way.cancel()
        await asyncio.gather(*running, return_exceptions=True)
