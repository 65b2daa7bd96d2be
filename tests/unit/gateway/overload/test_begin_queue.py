"""The begin queue: waiting requests start by priority, newest first, or are flagged late, and are never lost."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from services.contracts.access import Priority
from services.gateway.overload.begin_queue import BeginQueue
from services.router.deadline import Deadline
from tests.support.clock import Clock

REQUESTS = st.lists(st.tuples(st.sampled_from(Priority), st.integers(0, 1_000_000), st.booleans()), max_size=30)


def deadline(arrived_s: float, total_s: float) -> Deadline:
    return Deadline(arrived_s, arrived_s + total_s, 0.0)


@given(requests=REQUESTS)
def test_each_request_begins_in_order_or_late(requests: list[tuple[Priority, int, bool]]) -> None:
    """The first request starts at once; each other starts by priority, newest first, or is late."""

    async def run() -> tuple[list[int], set[int], float]:
        """Submit all requests at once; return the start order, the late requests, and the final delay."""
        clock, began, late = Clock(), list[int](), set[int]()
        queue = BeginQueue(clock, 0.2)

        async def ask(number: int, priority: Priority, stamp: int, *, is_short: bool) -> None:
            if await queue.begin(priority, deadline(clock.now_s + stamp / 1e9, 0.1 if is_short else 60.0)):
                began.append(number)
            else:
                late.add(number)

        def pass_time() -> None:
            """Make the short requests late."""
            clock.now_s += 0.06

        tasks = [asyncio.ensure_future(ask(n, p, at, is_short=short)) for n, (p, at, short) in enumerate(requests)]
        asyncio.get_running_loop().call_soon(pass_time)
        await asyncio.gather(*tasks)
        return began, late, queue.delay_s

    began, late, delay_s = asyncio.run(run())

    short = {number for number, request in enumerate(requests) if request[2] and number}
    ranks = [(requests[number][0], -requests[number][1], number) for number in began[1:]]
    assert sorted([*began, *late]) == list(range(len(requests)))
    assert late == short
    assert ranks == sorted(ranks)
    assert began[:1] == [0][: len(requests)]
    assert delay_s == 0


async def test_long_turns_begin_several_requests() -> None:
    """Forty requests and turns of 50 ms would take two seconds one by one; eight begin per turn."""
    clock = Clock()
    queue, began_s = BeginQueue(clock, 0.2), list[float]()

    async def ask() -> None:
        """Wait for one request's turn, and make the turn long."""
        await queue.begin(Priority.NORMAL, deadline(clock.now_s, 60.0))
        began_s.append(clock.now_s)

    def pass_time() -> None:
        """Make each turn long."""
        clock.now_s += 0.05
        if len(began_s) < 40:
            asyncio.get_running_loop().call_soon(pass_time)

    tasks = [asyncio.ensure_future(ask()) for _ in range(40)]
    asyncio.get_running_loop().call_soon(pass_time)
    await asyncio.gather(*tasks)

    assert max(began_s.count(at_s) for at_s in began_s) == 8


async def test_a_request_whose_caller_left_takes_no_turn() -> None:
    """A cancelled waiter takes no turn: the remaining waiters start in the next turns."""
    queue, began = BeginQueue(Clock(), 0.2), list[int]()

    async def ask(number: int) -> None:
        await queue.begin(Priority.NORMAL, deadline(1_000.0 + number, 60.0))
        began.append(number)

    tasks = [asyncio.ensure_future(ask(number)) for number in range(4)]
    await asyncio.sleep(0)
    tasks[3].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0)
    await ask(4)

    assert began == [0, 2, 1, 4]


async def test_tenants_take_turns_by_weight() -> None:
    """A tenant with many waiting requests delays its own only; twice the weight begins twice as many."""
    queue, began = BeginQueue(Clock(), 0.2), list[str]()

    async def ask(tenant: str, number: int, weight: float) -> None:
        await queue.begin(Priority.NORMAL, deadline(1_000.0 + number, 60.0), tenant, weight)
        began.append(tenant)

    flood = [asyncio.ensure_future(ask("a", number, 1.0)) for number in range(20)]
    others = [asyncio.ensure_future(ask("b", number, 2.0)) for number in range(6)]
    await asyncio.gather(*flood, *others)

    assert began[:9].count("b") in {5, 6}
    assert began[9:].count("b") <= 1
