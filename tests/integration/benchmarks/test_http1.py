"""The load generator's HTTP/1.1 through a real edge, and against a server that closes connections."""

import asyncio
from pathlib import Path

import psutil

from benchmarks.load.clients import RestClient
from benchmarks.load.http1 import Http1Channel, answer_in
from tests.support.gateway.edge_scene import EdgeScene
from tests.support.gateway.named_doors import RAY
from tests.support.servers import HOST, free_port
from tests.support.wait import wait_for

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n"


def as_sent(status: int, body: bytes) -> tuple[int, bytes]:
    """Return an answer undecoded."""
    return status, body


async def test_each_concurrent_call_has_a_connection_that_later_calls_use(tmp_path: Path) -> None:
    """Two rounds of 20 calls take 20 connections; a closed port has the status 0."""
    scene = EdgeScene(tmp_path)
    try:
        scene.start_doors(RAY)
        scene.start_edge()
        scene.until_open()
        wait_for(lambda: scene.is_ray_up is True, what="the edge's checks")
        async with RestClient(HOST, scene.settings.http_port) as rest:
            rounds = [await asyncio.gather(*(rest.nothing() for _ in range(20))) for _ in range(2)]
            ends = [end.raddr.port for end in psutil.Process().net_connections() if end.raddr]
    finally:
        scene.close()
    lost = await RestClient(HOST, free_port()).call(b"GET", b"/healthz", b"")

    assert {outcome.reason for outcomes in rounds for outcome in outcomes} == {"http_200"}
    assert ends.count(scene.settings.http_port) == 20
    assert lost == (0, b"")


async def test_a_closed_connection_is_replaced_and_a_cancelled_call_closes_its_own() -> None:
    """The server closes each connection at its second request, and never answers a third."""
    num_requests, arrived, closed = 0, asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the first request of a connection."""
        nonlocal num_requests
        for is_first in (True, False):
            await reader.readuntil(b"\r\n\r\n")
            num_requests += 1
            if is_first and num_requests < 4:
                writer.write(CHUNKED)
            elif is_first:
                arrived.set()
                await reader.read()
                closed.set()
        writer.close()

    async with await asyncio.start_server(serve, HOST, 0) as server:
        channel = Http1Channel(*server.sockets[0].getsockname())
        answers = [await channel.call(b"GET / HTTP/1.1\r\n\r\n", as_sent) for _ in range(2)]
        sent = num_requests
        cancelled = Http1Channel(*server.sockets[0].getsockname()).call(b"GET / HTTP/1.1\r\n\r\n", as_sent)
        await asyncio.wait_for(arrived.wait(), 5)
        cancelled.cancel()
        await asyncio.wait_for(closed.wait(), 5)
        await channel.close()

    assert answers == [(200, b"abcde")] * 2
    assert sent == 3


def test_an_answer_is_complete_with_its_last_byte() -> None:
    """Any shorter part is not an answer, whether its length is stated, absent or in chunks."""
    stated = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nbusy"
    expected = {CHUNKED: (200, b"abcde"), stated: (429, b"busy"), b"HTTP/1.1 204 No\r\n\r\n": (204, b"")}

    for whole, answer in expected.items():
        assert answer_in(whole) == answer
        assert {answer_in(whole[:size]) for size in range(len(whole))} == {None}
