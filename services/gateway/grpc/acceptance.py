"""Accepts several gRPC calls in one turn of the event loop, and announces the edge's limit with their answers.

grpc.aio asks its core for one call of a method, and for the next after several turns of the loop: under load most calls
wait in the core, unread, while the loop has time. A changed limit is sent as initial metadata of the next answer,
because HAProxy reads no trailers. It replaces a private class, read in grpcio 1.85.1.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from grpc._cython import cygrpc

from services.gateway.call.headers import EDGE_LIMIT

NUM_AHEAD = 16
"""Calls of a method that the core may hand over at once."""


Announce = Callable[[], str | None]
"""Returns the edge's limit if it has changed since the last call."""


class _ManyCallsServer(cygrpc.AioServer):  # type: ignore[misc]
    """A server that asks for `NUM_AHEAD` further calls of each registered method."""

    announce: Announce

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        thread_pool: Any,
        generic_handlers: Any,
        interceptors: Any,
        options: Any,
        maximum_concurrent_rpcs: int | None,
    ) -> None:
        self._own_loop = loop
        self._is_plain = not interceptors and maximum_concurrent_rpcs is None
        self._handlers: dict[str, Any] = {}
        self._running = set[asyncio.Task[None]]()
        super().__init__(loop, thread_pool, generic_handlers, interceptors, options, maximum_concurrent_rpcs)

    def add_registered_method_handlers(self, method_handlers: dict[str, Any]) -> None:
        if self._is_plain:
            method_handlers = {name: self._announcing(handler) for name, handler in method_handlers.items()}
            self._handlers.update(method_handlers)
        super().add_registered_method_handlers(method_handlers)

    def _announcing(self, handler: Any) -> Any:
        """Return a method handler that announces the limit; unchanged, if it streams."""
        answer: Callable[[Any, Any], Awaitable[Any]] | None = handler.unary_unary
        if answer is None or handler.request_streaming or handler.response_streaming:
            return handler
        announce = type(self).announce

        async def announced(request: Any, context: Any) -> Any:
            message = await answer(request, context)
            if (limit := announce()) is not None:
                await context.send_initial_metadata(((EDGE_LIMIT, limit),))
            return message

        return handler._replace(unary_unary=announced)

    async def _server_main_loop(self, server_started: "asyncio.Future[bool]") -> None:
        accepting = self._own_loop.create_task(self._accept_after(server_started))
        try:
            await super()._server_main_loop(server_started)
        finally:
            accepting.cancel()

    async def _accept_after(self, server_started: "asyncio.Future[bool]") -> None:
        await asyncio.shield(server_started)
        await asyncio.gather(*(self._accept(name) for name in self._handlers for _ in range(NUM_AHEAD)))

    async def _accept(self, name: str) -> None:
        """Handle call after call of this method until the server stops."""
        resolver = cygrpc._MethodResolver([], {name: self._handlers[name]})
        while self.is_running():
            try:
                state = await self._request_registered_call(name.encode())
            except cygrpc._RequestCallError:  # the server stops
                continue
            handling = cygrpc._handle_rpc(name, resolver, (), state, self._own_loop, False)
            self._start(cygrpc._schedule_rpc_coro(handling, state, self._own_loop, name))

    def _start(self, call: Any) -> None:
        task = self._own_loop.create_task(call)
        self._running.add(task)
        task.add_done_callback(self._running.discard)


def accept_many_calls(announce: Announce) -> None:
    """Change the servers that this process makes from now on, except servers with interceptors or a limit of calls."""
    cygrpc.AioServer = type("ManyCallsServer", (_ManyCallsServer,), {"announce": staticmethod(announce)})
