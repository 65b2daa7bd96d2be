"""The proxy's faults on real sockets: client errors, and the bytes that pass afterwards."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from benchmarks.faults.tcp_proxy import Slowness, TcpProxy, Wire
from tests.support.servers import HOST, free_port


@pytest.fixture
async def echo_port() -> AsyncIterator[int]:
    """The port of an echo server."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Echo until the end of the stream."""
        while piece := await reader.read(65_536):
            writer.write(piece)
        writer.close()

    server = await asyncio.start_server(echo, HOST, 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


@pytest.fixture
async def proxy(echo_port: int) -> AsyncIterator[TcpProxy]:
    """A proxy in front of the echo server."""
    async with TcpProxy(HOST, free_port(), echo_port, Slowness(delay_s=0.05)) as made:
        yield made


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[], Awaitable[Connection]]


@pytest.fixture
async def connect(proxy: TcpProxy) -> AsyncIterator[Connect]:
    """Connect through the proxy; all connections are closed afterwards."""
    opened: list[Connection] = []

    async def make() -> Connection:
        """Open a connection."""
        opened.append(await asyncio.open_connection(HOST, proxy.port))
        return opened[-1]

    yield make
    for _, writer in opened:
        writer.close()


async def echoed(connection: Connection, words: bytes) -> bytes:
    """Send bytes and return the same number of received bytes."""
    reader, writer = connection
    writer.write(words)
    return await asyncio.wait_for(reader.readexactly(len(words)), 5.0)


async def test_a_close_travels_through(connect: Connect) -> None:
    """After the client's end of stream, the server's last bytes and then its end of stream arrive."""
    reader, writer = await connect()
    writer.write(b"last words")
    writer.write_eof()

    assert await asyncio.wait_for(reader.read(), 5) == b"last words"


@pytest.mark.parametrize("wire", [Wire.STOP, Wire.RESET])
async def test_stop_and_reset_break_every_connection(proxy: TcpProxy, connect: Connect, wire: Wire) -> None:
    """Open and new connections fail, stopped ones as without a server; afterwards the same port serves again."""
    old = await connect()
    await echoed(old, b"before")

    await proxy.become(wire)
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await echoed(old, b"during")
    with pytest.raises(ConnectionRefusedError if wire is Wire.STOP else (ConnectionError, asyncio.IncompleteReadError)):
        await echoed(await connect(), b"during")
    await proxy.become(Wire.PASS)

    assert await echoed(await connect(), b"after") == b"after"


async def test_hang_keeps_sent_bytes(proxy: TcpProxy, connect: Connect) -> None:
    """Connections stay open without transferring data while hung, and no data is lost."""
    old = await connect()
    await echoed(old, b"before")

    await proxy.become(Wire.HANG)
    new = await connect()
    waiting = [asyncio.create_task(echoed(one, b"during")) for one in (old, new)]
    done, _ = await asyncio.wait(waiting, timeout=0.2)
    await proxy.become(Wire.PASS)

    assert not done
    assert await asyncio.gather(*waiting) == [b"during"] * 2


async def test_corrupt_changes_what_the_server_sends(proxy: TcpProxy, connect: Connect) -> None:
    """One bit of each chunk from the server is flipped; afterwards chunks pass unchanged."""
    connection = await connect()
    await proxy.become(Wire.CORRUPT)
    changed = await echoed(connection, b"abcde")
    await proxy.become(Wire.PASS)

    assert changed == b"abbde"
    assert await echoed(connection, b"abcde") == b"abcde"
