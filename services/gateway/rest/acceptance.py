"""Accepts all waiting connections in one turn of the event loop.

libuv, on which uvloop is built, accepts one connection a turn since 1.45. Under load the turns are long, and a request
on a new connection waits unread for as many of them as connections wait before it, while requests on older connections
are read at once. asyncio's own loop accepts all. Extends uvicorn's server, read in uvicorn 0.54.0.
"""

import asyncio
import os
import socket
from typing import Any

import uvicorn


class _Acceptor:
    """Accepts the connections of one listening socket, besides the server's own acceptance."""

    def __init__(self, server: uvicorn.Server, listening: socket.socket) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._socket = socket.socket(fileno=os.dup(listening.fileno()))  # the loop allows one watch per descriptor
        self._socket.setblocking(False)
        self._starting = set[asyncio.Task[Any]]()
        self._loop.add_reader(self._socket, self._accept_all)

    def close(self) -> None:
        self._loop.remove_reader(self._socket)
        self._socket.close()

    def _accept_all(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # none waits, or the process has no descriptor left
                return
            connection.setblocking(False)
            task = self._loop.create_task(self._start(connection))
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _start(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, connection, ssl=self._server.config.ssl)
        except OSError:  # the caller has gone
            connection.close()

    def _protocol(self) -> asyncio.Protocol:
        server = self._server
        make: Any = server.config.http_protocol_class
        protocol: asyncio.Protocol = make(
            config=server.config, server_state=server.server_state, app_state=server.lifespan.state
        )
        return protocol


class _ManyConnectionsServer(uvicorn.Server):
    _acceptors: tuple[_Acceptor, ...] = ()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not isinstance(asyncio.get_running_loop(), asyncio.SelectorEventLoop):
            self._acceptors = tuple(
                _Acceptor(self, listening) for server in self.servers for listening in server.sockets
            )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for acceptor in self._acceptors:
            acceptor.close()
        await super().shutdown(sockets)


def accept_many_connections() -> None:
    """Change the uvicorn servers that this process makes from now on."""
    uvicorn.Server = _ManyConnectionsServer  # type: ignore[misc]
