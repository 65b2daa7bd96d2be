"""The rate at which a stack ranks in full: for waiting callers, and, lower, for an open loop.

Answers from memory do not count: waiting callers get three times as many of them.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence

from benchmarks.load.open_loop import Load, RequestOutcome, Send

NUM_CALLERS = (4, 8, 16, 32)
SUSTAINED, LOWERED, LEAST_PART = 0.995, 0.9, 0.2
"""The part of the requests in full and in time at the capacity; the factor of the next lower rate; the least rate, as a
part of the first."""
PAUSE_S = 5.0
"""Between rates: the stack must recover in it."""


def is_full(outcome: RequestOutcome) -> bool:
    """Whether the request was ranked in full."""
    return outcome.is_ok and outcome.reason != "shed"


def full_share(load: Load, deadline_ms: float) -> float:
    """Return the part of the requests that were ranked in full and in time."""
    return sum(shot.is_in_time(deadline_ms) and is_full(shot.outcome) for shot in load.shots) / len(load.shots)


async def sustained_rps(first_rps: float, share_at: Callable[[float], Awaitable[float]]) -> float:
    """Return the highest rate, of those tried from the first down, at which nearly all requests are ranked in full."""
    rate_rps = first_rps
    while rate_rps > LEAST_PART * first_rps:
        await asyncio.sleep(PAUSE_S)
        share = await share_at(rate_rps)
        print(f"open loop {rate_rps:.0f}/s: {share:.4f} in full", flush=True)
        if share >= SUSTAINED:
            return rate_rps
        rate_rps *= LOWERED
    sys.exit("error: the stack does not sustain a fifth of the closed-loop rate; free the machine, and run again")


async def closed_loop_rps(senders: Sequence[Send], seconds: float, deadline_ms: float) -> float:
    """Return the most answers per second, in full and in time, that a number of waiting callers got."""
    tried = [await _answers_of_callers(senders, seconds, deadline_ms, number) for number in NUM_CALLERS]
    print(f"closed loop {max(tried):.0f}/s, of {[round(rps) for rps in tried]}", flush=True)
    return max(tried)


async def _answers_of_callers(senders: Sequence[Send], seconds: float, deadline_ms: float, num_callers: int) -> float:
    started_s, num_counted = time.perf_counter(), 0

    async def call_again_and_again(send: Send, first: int) -> None:
        nonlocal num_counted
        while (departed_s := time.perf_counter()) < started_s + seconds:
            outcome = await send(first)
            is_in_time = 1_000 * (time.perf_counter() - departed_s) <= deadline_ms
            num_counted += is_full(outcome) and is_in_time
            first += num_callers

    callers = (call_again_and_again(senders[number % len(senders)], number) for number in range(num_callers))
    await asyncio.gather(*callers)
    return num_counted / (time.perf_counter() - started_s)
