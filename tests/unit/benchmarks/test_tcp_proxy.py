"""The proxy's faults on real sockets: the client's errors, and the bytes that pass afterwards."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from benchmarks.faults.tcp_proxy import Slowness, TcpProxy, Wire
from tests.support.servers import HOST, free_port


@pytest.fixture
async def echo_port() -> AsyncIterator[int]:
    """A server that echoes."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Echo until the end."""
        while piece := await reader.read(65_536):
            writer.write(piece)
        writer.close()

    server = await asyncio.start_server(echo, HOST, 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


@pytest.fixture
async def proxy(echo_port: int) -> AsyncIterator[TcpProxy]:
    """A proxy in front of it."""
    async with TcpProxy(HOST, free_port(), echo_port, Slowness(delay_s=0.05)) as made:
        yield made


class Client:
    """One connection through the proxy."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def to(cls, proxy: TcpProxy) -> "Client":
        """Connect."""
        return cls(*await asyncio.open_connection(HOST, proxy.port))

    async def send(self, question: bytes, timeout_s: float = 5.0) -> bytes:
        """Send, and read as many bytes back."""
        self._writer.write(question)
        return await asyncio.wait_for(self._reader.readexactly(len(question)), timeout_s)

    def close(self) -> None:
        """Close."""
        self._writer.close()


async def test_a_close_travels_through(proxy: TcpProxy, echo_port: int) -> None:
    """After the client's end of stream the server's last bytes arrive, then its end of stream."""
    reader, writer = await asyncio.open_connection(HOST, proxy.port)
    writer.write(b"last words")
    writer.write_eof()

    assert await asyncio.wait_for(reader.read(), 5) == b"last words"
    writer.close()


async def test_stop_refuses_and_resets(proxy: TcpProxy) -> None:
    """Connections fail as without a server process; afterwards the same port serves again."""
    client = await Client.to(proxy)
    await client.send(b"before")

    await proxy.become(Wire.STOP)
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await client.send(b"during")
    with pytest.raises(ConnectionRefusedError):
        await Client.to(proxy)
    await proxy.become(Wire.PASS)
    again = await Client.to(proxy)

    assert await again.send(b"after") == b"after"
    again.close()


async def test_hang_keeps_sent_bytes(proxy: TcpProxy) -> None:
    """Old and new connections stay open without a byte, and nothing is lost."""
    old = await Client.to(proxy)
    await old.send(b"before")

    await proxy.become(Wire.HANG)
    new = await Client.to(proxy)
    waiting = [asyncio.create_task(client.send(b"during")) for client in (old, new)]
    done, _ = await asyncio.wait(waiting, timeout=0.2)
    await proxy.become(Wire.PASS)

    assert not done
    assert await asyncio.gather(*waiting) == [b"during"] * 2
    old.close()
    new.close()


async def test_reset_breaks_every_connection(proxy: TcpProxy) -> None:
    """Later connections are reset too."""
    old = await Client.to(proxy)
    await old.send(b"before")

    await proxy.become(Wire.RESET)
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await old.send(b"during")
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await (await Client.to(proxy)).send(b"during")
    await proxy.become(Wire.PASS)
    again = await Client.to(proxy)

    assert await again.send(b"after") == b"after"
    again.close()
