"""Calls of a gRPC server: several begin per turn of the event loop, and answers announce a changed limit."""

import asyncio
import time

import grpc
import pytest

from services.gateway.call.headers import EDGE_LIMIT
from services.gateway.grpc import acceptance

NUM_CALLS = 12
METHOD = "/a.Service/Method"


@pytest.fixture(name="limits")
def changed_servers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Change the servers of this test; return the limits that they announce, in turn."""
    limits: list[str] = []
    monkeypatch.setattr(acceptance.cygrpc, "AioServer", acceptance.cygrpc.AioServer)
    acceptance.accept_many_calls(lambda: limits.pop(0) if limits else None)
    return limits


async def calls_per_turn() -> list[int]:
    """Return how many of some calls, all sent while the loop was busy, began in each turn that began any."""
    began: list[int] = []
    turn = 0

    async def answer(request: bytes, _: object) -> bytes:
        """Note the turn of the loop."""
        began.append(turn)
        return request

    def count_turns() -> None:
        """Count this turn and the next."""
        nonlocal turn
        turn += 1
        loop.call_soon(count_turns)

    server, loop = grpc.aio.server(), asyncio.get_running_loop()
    handlers = {"Method": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_registered_method_handlers("a.Service", handlers)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    loop.call_soon(count_turns)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary(METHOD)
        await asyncio.to_thread(call, b"first")
        began.clear()
        sent = [call.future(b"x") for _ in range(NUM_CALLS)]
        time.sleep(0.2)  # noqa: ASYNC251 - a busy loop, while the calls arrive
        assert await asyncio.gather(*(asyncio.to_thread(call.result, 10) for call in sent)) == [b"x"] * NUM_CALLS
    await server.stop(None)
    return [began.count(number) for number in sorted(set(began))]


async def test_calls_that_arrived_meanwhile_begin_together(limits: list[str]) -> None:
    """Most of the calls begin in the same turn; grpc.aio by itself begins one or two."""
    assert limits == []
    assert max(await calls_per_turn()) > NUM_CALLS / 2


async def test_a_changed_limit_is_announced_once(limits: list[str]) -> None:
    """The next answer has the limit as initial metadata, further answers have none."""
    limits.append("8 16")

    async def answer(request: bytes, _: object) -> bytes:
        """Return the request."""
        return request

    server = grpc.aio.server()
    server.add_registered_method_handlers("a.Service", {"Method": grpc.unary_unary_rpc_method_handler(answer)})
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        calls = []
        for _ in range(2):
            calls.append(channel.unary_unary(METHOD)(b"x"))
            assert await calls[-1] == b"x"
        announced = [dict(await call.initial_metadata()).get(EDGE_LIMIT) for call in calls]
    await server.stop(None)

    assert announced == ["8 16", None]
