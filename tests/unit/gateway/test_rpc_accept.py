"""Several gRPC calls are taken in at a time, each of them once, and by the method that was called."""

import asyncio
import time
from collections import Counter

import grpc
import pytest
from grpc._cython import cygrpc

from services.gateway.grpc.rpc_accept import _WideServer, accept_widely

NUM_CALLS = 200


@pytest.fixture
def plain_grpc(monkeypatch):
    """grpc is as it was at first, whatever other tests did to it; what is done to it here is undone."""
    monkeypatch.setattr(cygrpc, "AioServer", _WideServer.__base__)


async def taken_in() -> tuple[Counter[int], list[bytes]]:
    """Send many calls of two methods at once; give how many were taken in at each turn of the loop, and the answers."""
    loop, turn, taken = asyncio.get_running_loop(), 0, Counter()

    def count_turns() -> None:
        """Be called once in each turn."""
        nonlocal turn
        turn += 1
        time.sleep(0.001)  # a turn in which others had something to do, so that calls come meanwhile
        loop.call_soon(count_turns)

    def answering(name: bytes):
        """Make a method that answers with its name."""

        async def answer(request: bytes, _context) -> bytes:
            """Note the turn."""
            taken[turn] += 1
            return name + request

        return grpc.unary_unary_rpc_method_handler(answer)

    server = grpc.aio.server()
    server.add_registered_method_handlers("s.S", {"A": answering(b"a"), "B": answering(b"b")})
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        asks = {name: channel.unary_unary(f"/s.S/{name}", _registered_method=True) for name in "AB"}
        count_turns()
        answers = await asyncio.gather(*(asks["AB"[n % 2]](b"%d" % n) for n in range(NUM_CALLS)))
    await server.stop(None)
    return taken, answers


async def test_many_calls_are_taken_in_at_a_time(plain_grpc) -> None:
    """So it takes fewer turns than by grpc alone, which takes two, of two methods; each call is answered once, by its own method."""
    alone, _ = await taken_in()

    accept_widely()
    widely, answers = await taken_in()

    assert answers == [b"%s%d" % (b"ab"[n % 2 : n % 2 + 1], n) for n in range(NUM_CALLS)]
    assert widely.total() == NUM_CALLS
    assert len(widely) < len(alone) / 2
