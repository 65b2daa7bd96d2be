"""From a shared port to a server behind a Unix socket: `pytest tests/unit/infra/test_relay.py`."""

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from infra.local.standby.relay import Relay
from infra.local.standby.shared_port import SharedPort, can_share
from tests.support.servers import HOST, free_port

pytestmark = pytest.mark.skipif(not can_share(), reason="this kernel does not lead connections")
LARGE = bytes(range(256)) * 8_192


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[Relay]:
    """A relay to a server that gives back what it gets, and ends at an empty line."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send back what comes."""
        while (chunk := await reader.read(10_000)) and chunk != b"\n":
            writer.write(chunk)
            await writer.drain()
        writer.close()

    path = tmp_path / "echo.sock"
    async with await asyncio.start_unix_server(echo, path), Relay(SharedPort(HOST, free_port()), path) as made:
        yield made


def address(relay: Relay) -> tuple[str, int]:
    """Where callers come to."""
    host, port = relay.port.socket.getsockname()
    return host, port


async def test_every_byte_goes_both_ways(relay: Relay) -> None:
    """More than any buffer holds, in order."""
    reader, writer = await asyncio.open_connection(*address(relay))
    writer.write(LARGE)

    assert await reader.readexactly(len(LARGE)) == LARGE
    writer.close()


async def test_the_server_ends_a_connection(relay: Relay) -> None:
    """What it wrote before still arrives."""
    reader, writer = await asyncio.open_connection(*address(relay))
    writer.write(b"last words")
    assert await reader.readexactly(10) == b"last words"
    writer.write(b"\n")

    assert await reader.read() == b""
    writer.close()


async def test_a_server_that_is_away_closes_the_connection(tmp_path: Path) -> None:
    """At once, rather than leaving the caller to wait."""
    async with Relay(SharedPort(HOST, free_port()), tmp_path / "nobody.sock") as relay:
        reader, writer = await asyncio.open_connection(*address(relay))

        assert await reader.read() == b""
        writer.close()


async def test_it_knows_whether_it_is_reached(relay: Relay) -> None:
    """And notices when connections go to another listener instead."""
    relay.port.lead(to_us=True)
    assert await relay.is_reached()

    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(address(relay))
        other.listen()
        assert await relay.is_reached()
        relay.port.lead(to_us=False)

        assert not await relay.is_reached()
