"""The rate that a stack sustains: answers per second for callers that each wait for their answer."""

import asyncio
import time
from collections.abc import Callable, Sequence

from benchmarks.load.open_loop import RequestOutcome, Send

NUM_CALLERS = 32


async def capacity_of(
    senders: Sequence[Send],
    seconds: float,
    deadline_ms: float,
    counts: Callable[[RequestOutcome], bool] = lambda outcome: outcome.is_ok,
    num_callers: int = NUM_CALLERS,
) -> float:
    """Return the answers in time per second, of those that count, for callers divided among the senders."""
    started_s, num_counted = time.perf_counter(), 0

    async def call_again_and_again(send: Send, first: int) -> None:
        nonlocal num_counted
        while (departed_s := time.perf_counter()) < started_s + seconds:
            outcome = await send(first)
            is_in_time = 1_000 * (time.perf_counter() - departed_s) <= deadline_ms
            num_counted += counts(outcome) and is_in_time
            first += num_callers

    callers = (call_again_and_again(senders[number % len(senders)], number) for number in range(num_callers))
    await asyncio.gather(*callers)
    return num_counted / (time.perf_counter() - started_s)
