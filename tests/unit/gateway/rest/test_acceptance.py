"""Connections of an HTTP server on uvloop: all that wait are accepted together."""

import asyncio
import socket
from typing import Any

import pytest
import uvicorn
import uvloop

from services.gateway.rest.acceptance import accept_many_connections
from tests.support.wait import until

NUM_CALLERS = 12
REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def turns_until_all_are_read() -> tuple[int, list[bytes]]:
    """Return the turns of the loop from the first to the last request, each waiting on its own new connection.

    Also return the answers. The server then ends, and its address refuses connections.
    """
    loop = asyncio.get_running_loop()
    assert not isinstance(loop, asyncio.SelectorEventLoop)
    turn, read, all_read = 0, list[int](), asyncio.Event()

    def count_turns() -> None:
        """Count this turn and the next."""
        nonlocal turn
        turn += 1
        if not all_read.is_set():
            loop.call_soon(count_turns)

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        """Note the turn of the loop, and answer."""
        read.append(turn)
        if len(read) == NUM_CALLERS:
            all_read.set()
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    listening = socket.create_server(("127.0.0.1", 0), backlog=NUM_CALLERS)
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None))
    serving = asyncio.create_task(server.serve([listening]))
    await until(lambda: server.started)
    callers = [socket.create_connection(listening.getsockname()) for _ in range(NUM_CALLERS)]
    for caller in callers:
        caller.sendall(REQUEST)
    loop.call_soon(count_turns)
    await all_read.wait()
    answers = [await asyncio.to_thread(caller.recv, 12) for caller in callers]
    for caller in callers:
        caller.close()
    address = listening.getsockname()
    server.should_exit = True
    await serving
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
    return read[-1] - read[0], answers


def test_connections_that_wait_are_accepted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests on waiting connections are read within a few turns; uvloop itself accepts one connection a turn."""
    monkeypatch.setattr(uvicorn, "Server", uvicorn.Server)
    accept_many_connections()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        num_turns, answers = runner.run(turns_until_all_are_read())

    assert answers == [b"HTTP/1.1 204"] * NUM_CALLERS
    assert num_turns < NUM_CALLERS / 2
