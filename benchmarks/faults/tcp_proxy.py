"""A TCP proxy with injected faults between the stack and a dependency.

    PASS    forward
    STOP    close the listener: new connections are refused, existing connections are reset
    HANG    accept and hold connections without forwarding; held data is forwarded afterwards
    SLOW    delay every chunk, in both directions
    RESET   accept connections and reset them at once
    CORRUPT forward, with the server's bytes changed

One listener on loopback, inside the caller's event loop, which also controls it.
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

_PIECE_BYTES = 65_536
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER with no time: close sends RST."""


class Wire(StrEnum):
    """The proxy's mode."""

    PASS = "pass"  # noqa: S105 - no secret
    STOP = "stop"
    HANG = "hang"
    SLOW = "slow"
    RESET = "reset"
    CORRUPT = "corrupt"


@dataclass(frozen=True, slots=True)
class Slowness:
    """Delay of SLOW: seconds before each chunk of at most 64 KiB, and bytes per second.

    With `is_one_way` only the caller's chunks are delayed, so that a request is late by `delay_s` whatever its reply.
    """

    delay_s: float = 0.05
    bytes_per_s: float = 1e9
    is_one_way: bool = False


def flip_middle(piece: bytes) -> bytes:
    """Return the chunk with one bit changed, in its middle."""
    middle = len(piece) // 2
    return piece[:middle] + bytes([piece[middle] ^ 1]) + piece[middle + 1 :]


class TcpProxy:
    """One port in front of one server, both on `host`. `corrupt` changes a chunk of the server, keeping its length."""

    def __init__(
        self,
        host: str,
        port: int,
        server_port: int,
        slowness: Slowness = Slowness(),
        corrupt: Callable[[bytes], bytes] = flip_middle,
    ) -> None:
        self._host = host
        self.port = port
        self._server_port = server_port
        self._slowness = slowness
        self._corrupt = corrupt
        self._wire = Wire.PASS
        self._moves = asyncio.Event()
        self._moves.set()
        self._listener: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = {}

    @property
    def server_port(self) -> int:
        """The destination of new connections."""
        return self._server_port

    @property
    def wire(self) -> Wire:
        """The current mode."""
        return self._wire

    async def __aenter__(self) -> Self:
        await self._listen()
        return self

    async def __aexit__(self, *_exit: object) -> None:
        await self.become(Wire.STOP)
        await asyncio.gather(*self._connections, return_exceptions=True)

    def lead_to(self, server_port: int) -> None:
        """Route new connections to another server; existing connections stay, as after a DNS change."""
        self._server_port = server_port

    async def become(self, wire: Wire) -> None:
        """Switch to this mode, for existing connections too."""
        self._wire = wire
        (self._moves.clear if wire is Wire.HANG else self._moves.set)()
        if wire in {Wire.STOP, Wire.RESET}:
            for task, writers in self._connections.items():
                _reset(writers)
                task.cancel()
        if wire is Wire.STOP and self._listener is not None:
            self._listener.close()
            self._listener = None
        elif wire is not Wire.STOP and self._listener is None:
            await self._listen()

    async def _listen(self) -> None:
        self._listener = await asyncio.start_server(self._serve, self._host, self.port, backlog=512)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = [writer]
        try:
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await self._connect(reader, writer, self._connections[task])
        finally:
            for stream in self._connections.pop(task):
                stream.close()

    async def _connect(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, writers: list[asyncio.StreamWriter]
    ) -> None:
        if self._wire is Wire.RESET:
            _reset(writers)
            return
        await self._moves.wait()
        server_reader, server_writer = await asyncio.open_connection(self._host, self._server_port)
        writers.append(server_writer)
        there = asyncio.create_task(self._pump(reader, server_writer))
        back = asyncio.create_task(self._pump(server_reader, writer, is_back=True))
        try:
            await asyncio.wait({there, back}, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for pump in (there, back):
                pump.cancel()
            await asyncio.gather(there, back, return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_back: bool = False) -> None:
        """Move bytes in one direction until that end closes, then close the other's half."""
        while piece := await reader.read(_PIECE_BYTES):
            if self._wire is Wire.SLOW and not (is_back and self._slowness.is_one_way):
                await asyncio.sleep(self._slowness.delay_s + len(piece) / self._slowness.bytes_per_s)
            await self._moves.wait()
            writer.write(self._corrupt(piece) if is_back and self._wire is Wire.CORRUPT else piece)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()


def _reset(writers: list[asyncio.StreamWriter]) -> None:
    for writer in writers:
        raw = writer.get_extra_info("socket")
        if raw is not None and not writer.transport.is_closing():
            with contextlib.suppress(OSError):
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            writer.transport.abort()
