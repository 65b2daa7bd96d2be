"""Unary gRPC calls over HTTP/2, written frame by frame, at a third of grpc.aio's processor time.

Thousands of calls a second from grpc.aio would take a core of the machine whose stack they measure. The library h2
(4.4) would take more: 164 to 214 µs of processor time for a call's frames, in memory, where this takes 11 to 13
(2026-11-29). Understands the answers of HAProxy, whose headers are literals: no Huffman codes and no dynamic table.
Plaintext only.
"""

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar, cast

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _END_HEADERS, _ACK = 0x1, 0x4, 0x1
_HEAD_BYTES = 9
_MAX_WINDOW = 2**31 - 1
_FIRST_WINDOW = 65_535
_MAX_STREAMS, _INITIAL_WINDOW = 3, 4
"""Names of settings."""
UNAVAILABLE = 14
Decoded = TypeVar("Decoded")


@dataclass(slots=True)
class CallAnswer:
    """A call's status, the status message, and the answer's message."""

    status: int = UNAVAILABLE
    details: str = "no connection"
    message: bytes = b""


@dataclass(slots=True)
class _Stream:
    ended: "asyncio.Future[Any]"
    decode: Callable[[CallAnswer], Any]
    headers: bytearray = field(default_factory=bytearray)
    data: bytearray = field(default_factory=bytearray)

    def end(self, answer: CallAnswer) -> None:
        """Decode the answer for a caller that still waits."""
        if not self.ended.done():
            self.ended.set_result(self.decode(answer))


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return one frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def header_block(authority: str, path: str, metadata: tuple[tuple[str, str], ...]) -> bytes:
    """Return a call's headers in HPACK, as literals that are not indexed."""
    named = [(":authority", authority), ("te", "trailers"), ("content-type", "application/grpc"), *metadata]
    return b"\x83\x86\x04" + _text(path) + b"".join(b"\x00" + _text(name) + _text(value) for name, value in named)


def _text(value: str) -> bytes:
    raw = value.encode()
    if len(raw) < 127:
        return bytes([len(raw)]) + raw
    rest, length = len(raw) - 127, bytearray([127])
    while rest >= 128:
        length.append(rest % 128 + 128)
        rest //= 128
    return bytes([*length, rest]) + raw


def literal(block: bytes, name: bytes) -> bytes | None:
    """Return the value of a header that is a literal of at most 126 bytes; None if the block has none."""
    at = block.find(bytes([len(name)]) + name)
    if at < 0:
        return None
    start = at + 1 + len(name)
    return bytes(block[start + 1 : start + 1 + block[start]])


class Connection(asyncio.Protocol):
    """One HTTP/2 connection; calls wait while the server allows no further stream."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._streams: dict[int, _Stream] = {}
        self._queued: deque[tuple[bytes, bytes, _Stream]] = deque()
        self._next_stream = 1
        self._max_streams = 100
        self._window = _FIRST_WINDOW
        self._unread = b""
        self._num_consumed = 0
        self._outgoing: list[bytes] = []
        self._loop = asyncio.get_running_loop()
        self.is_open = False

    @classmethod
    async def opened(cls, host: str, port: int) -> Self:
        """Connect. Raises OSError."""
        _, connection = await asyncio.get_running_loop().create_connection(cls, host, port)
        return connection

    def call(
        self, headers: bytes, message: bytes, decode: Callable[[CallAnswer], Decoded]
    ) -> "asyncio.Future[Decoded]":
        """Send a call and return its decoded answer, of status UNAVAILABLE if the connection ends."""
        ended: asyncio.Future[Decoded] = self._loop.create_future()
        stream = _Stream(ended, decode)
        if self.is_open:
            self._queued.append((headers, b"\x00" + struct.pack(">I", len(message)) + message, stream))
            self._start_queued()
        else:
            stream.end(CallAnswer())
        return ended

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the preface, with windows that never limit the answers."""
        transport = self._transport = cast("asyncio.Transport", transport)
        self.is_open = True
        settings = struct.pack(">HIHI", 2, 0, _INITIAL_WINDOW, _MAX_WINDOW)
        update = struct.pack(">I", _MAX_WINDOW - _FIRST_WINDOW)
        transport.write(_PREFACE + frame(_SETTINGS, 0, 0, settings) + frame(_WINDOW_UPDATE, 0, 0, update))

    def connection_lost(self, exc: Exception | None) -> None:
        """End all calls as unavailable."""
        self.is_open = False
        waiting = [*self._streams.values(), *(stream for *_, stream in self._queued)]
        self._streams.clear()
        self._queued.clear()
        for stream in waiting:
            stream.end(CallAnswer())

    def data_received(self, data: bytes) -> None:
        """Handle whole frames, and keep the rest for the next data."""
        data, at = self._unread + data, 0
        while len(data) - at >= _HEAD_BYTES:
            size = int.from_bytes(data[at : at + 3], "big")
            end = at + _HEAD_BYTES + size
            if len(data) < end:
                break
            stream = int.from_bytes(data[at + 5 : at + 9], "big") & _MAX_WINDOW
            self._receive(data[at + 3], data[at + 4], stream, data[at + _HEAD_BYTES : end])
            at = end
        self._unread = data[at:]
        self._start_queued()

    def _receive(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind in (_DATA, _HEADERS):
            stream = self._streams.get(number)
            if kind == _DATA:
                self._consume(len(payload))
            if stream is not None:
                (stream.data if kind == _DATA else stream.headers).extend(payload)
                if flags & _END_STREAM:
                    self._end(number, _answer_of(stream))
        elif kind == _RESET:
            self._end(number, CallAnswer(UNAVAILABLE, f"stream reset: {int.from_bytes(payload, 'big')}"))
        elif kind == _WINDOW_UPDATE and number == 0:
            self._window += int.from_bytes(payload, "big")
        elif kind == _SETTINGS and not flags & _ACK:
            self._max_streams = dict(struct.iter_unpack(">HI", payload)).get(_MAX_STREAMS, self._max_streams)
            self._write(frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            self._write(frame(_PING, _ACK, 0, payload))
        elif kind == _GOAWAY:
            self.is_open = False

    def _end(self, number: int, answer: CallAnswer) -> None:
        stream = self._streams.pop(number, None)
        if stream is not None:
            stream.end(answer)

    def _start_queued(self) -> None:
        while self._queued and len(self._streams) < self._max_streams and len(self._queued[0][1]) <= self._window:
            headers, body, stream = self._queued.popleft()
            if stream.ended.done():  # the caller has given up
                continue
            number, self._next_stream = self._next_stream, self._next_stream + 2
            self._streams[number] = stream
            self._window -= len(body)
            self._write(frame(_HEADERS, _END_HEADERS, number, headers) + frame(_DATA, _END_STREAM, number, body))

    def _consume(self, size: int) -> None:
        self._num_consumed += size
        if self._num_consumed > _MAX_WINDOW // 2:
            self._write(frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", self._num_consumed)))
            self._num_consumed = 0

    def _write(self, data: bytes) -> None:
        """Send with all else that this turn of the loop sends."""
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(data)

    def _flush(self) -> None:
        if self._transport is not None:
            self._transport.write(b"".join(self._outgoing))
        self._outgoing.clear()


def _answer_of(stream: _Stream) -> CallAnswer:
    block = bytes(stream.headers)
    status, details = literal(block, b"grpc-status"), literal(block, b"grpc-message")
    if status is None:
        return CallAnswer(UNAVAILABLE, "no grpc-status")
    return CallAnswer(int(status), (details or b"").decode(), bytes(stream.data[5:]))


class Http2Channel:
    """A few connections used in turn, as products with several processes have them; a lost one is replaced."""

    def __init__(self, address: str, num_connections: int, metadata: tuple[tuple[str, str], ...]) -> None:
        host, _, port = address.rpartition(":")
        self._address = (host, int(port))
        self._blocks: dict[str, bytes] = {}
        self._block_of: Callable[[str], bytes] = lambda path: header_block(address, path, metadata)
        self._connections: list[Connection | None] = [None] * num_connections
        self._opening = [asyncio.Lock() for _ in range(num_connections)]
        self._num_calls = 0

    def call(self, path: str, message: bytes, decode: Callable[[CallAnswer], Decoded]) -> "asyncio.Future[Decoded]":
        """Call the method at this path, and return its decoded answer."""
        index = self._num_calls % len(self._connections)
        self._num_calls += 1
        block = self._blocks.get(path) or self._blocks.setdefault(path, self._block_of(path))
        connection = self._connections[index]
        if connection is not None and connection.is_open:
            return connection.call(block, message, decode)
        return asyncio.ensure_future(self._call_on_new(index, block, message, decode))

    async def _call_on_new(
        self, index: int, block: bytes, message: bytes, decode: Callable[[CallAnswer], Decoded]
    ) -> Decoded:
        try:
            connection = await self._open(index)
        except OSError:
            return decode(CallAnswer())
        return await connection.call(block, message, decode)

    async def _open(self, index: int) -> Connection:
        """Connect once for all calls that wait for this connection. Raises OSError."""
        async with self._opening[index]:
            connection = self._connections[index]
            if connection is None or not connection.is_open:
                connection = self._connections[index] = await Connection.opened(*self._address)
        return connection

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections:
            if connection is not None:
                connection.close()
