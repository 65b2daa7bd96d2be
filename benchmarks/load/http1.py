"""HTTP/1.1 calls over kept-alive connections, at a fraction of the processor time of asyncio's streams.

Thousands of calls a second through streams, with a task for each, would take most of a core of the machine whose stack
they measure. One request at a time on each connection; plaintext only.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

Answer = TypeVar("Answer")
_END, _LENGTH, _CHUNKED = b"\r\n\r\n", b"content-length:", b"transfer-encoding: chunked"


class Call(asyncio.Future[Answer], Generic[Answer]):
    """A request and its decoded answer. Cancelling it closes its connection, on which an answer may be in flight."""

    def __init__(self, request: bytes, decode: Callable[[int, bytes], Answer]) -> None:
        super().__init__()
        self.request = request
        self._decode = decode
        self.connection: _Connection | None = None

    def end(self, status: int, body: bytes) -> None:
        """Decode the answer for a caller that still waits."""
        if self.done():
            return
        try:
            self.set_result(self._decode(status, body))
        except Exception as error:  # noqa: BLE001 - the caller judges an answer that cannot be decoded
            self.set_exception(error)

    def cancel(self, msg: Any | None = None) -> bool:
        """Give up."""
        if self.connection is not None and not self.done():
            self.connection.close()
        return super().cancel(msg)


class Http1Channel:
    """As many connections as there are concurrent calls; the last used is used next."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._idle: list[_Connection] = []
        self._connections: set[_Connection] = set()
        self._opening: set[asyncio.Task[None]] = set()

    def call(self, request: bytes, decode: Callable[[int, bytes], Answer]) -> Call[Answer]:
        """Send a request; its answer has the status 0 if no connection could carry it.

        A kept-alive connection that the server has closed is replaced, as in any HTTP client.
        """
        call = Call(request, decode)
        self._send(call)
        return call

    def _send(self, call: Call[Any]) -> None:
        while self._idle:
            if (connection := self._idle.pop()).is_open:
                connection.send(call)
                return
        task = asyncio.get_running_loop().create_task(self._send_on_new(call))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _send_on_new(self, call: Call[Any]) -> None:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(lambda: _Connection(self._idle, self._send), *self._address)
        except OSError:
            call.end(0, b"")
            return
        self._connections = {kept for kept in self._connections if kept.is_open} | {connection}
        if call.done():  # the caller has given up
            self._idle.append(connection)
        else:
            connection.send(call)

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*self._opening)
        for connection in self._connections:
            connection.close()
        await asyncio.gather(*(connection.closed for connection in self._connections))


class _Connection(asyncio.Protocol):
    """One connection; returns to the idle connections after each answer."""

    def __init__(self, idle: "list[_Connection]", send_again: Callable[[Call[Any]], None]) -> None:
        self._idle, self._send_again = idle, send_again
        self._call: Call[Any] | None = None
        self._received = b""
        self._is_used = False
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    def send(self, call: Call[Any]) -> None:
        """Send one call; its answer ends it."""
        self._call, call.connection = call, self
        self._transport.write(call.request)

    def close(self) -> None:
        """Close it; a call in progress ends as one without connection."""
        self._is_used = False
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Send a call in progress again if the server closed a kept-alive connection."""
        self.closed.set_result(None)
        call, self._call = self._call, None
        if call is not None and not call.done():
            if self._is_used:
                self._send_again(call)
            else:
                call.end(0, b"")

    def data_received(self, data: bytes) -> None:
        """End the call once its answer is complete."""
        self._received = data = self._received + data if self._received else data
        if (answer := answer_in(data)) is None or (call := self._call) is None:
            return
        self._received, self._call, self._is_used = b"", None, True
        self._idle.append(self)
        call.connection = None
        call.end(*answer)


def answer_in(data: bytes) -> tuple[int, bytes] | None:
    """Return the status and the body of a whole response; None while a part is missing."""
    if (at := data.find(_END)) < 0:
        return None
    head, start = data[:at].lower(), at + len(_END)
    status = int(head[9:12])
    if _CHUNKED in head:
        body = _joined_chunks(data, start)
        return None if body is None else (status, body)
    length_at = head.find(_LENGTH)
    length = int(head[length_at + len(_LENGTH) :].split(b"\r\n", 1)[0]) if length_at >= 0 else 0
    return (status, data[start : start + length]) if len(data) >= start + length else None


def _joined_chunks(data: bytes, at: int) -> bytes | None:
    """Return the body whose chunks begin at `at`; None while the last is missing."""
    chunks: list[bytes] = []
    while (end := data.find(b"\r\n", at)) >= 0:
        size = int(data[at:end].split(b";")[0], 16)
        at = end + 2 + size + 2
        if len(data) < at:
            return None
        if not size:
            return b"".join(chunks)
        chunks.append(data[end + 2 : at - 2])
    return None
