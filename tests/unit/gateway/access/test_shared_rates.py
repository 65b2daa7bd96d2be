"""Calls that all gateways together admit while the store of the shared counts is unavailable, on fake clocks."""

import pytest

from services.contracts.access import Allowance, Ask, Grant
from services.errors import DependencyUnavailable, QuotaExceeded
from services.gateway.access.rates import PEERS_KEPT_S, Peers
from services.gateway.access.shared_rates import SharedRates
from tests.support.clock import Clock

MOST = 16
RATE, BURST, QUOTA, AWAY_S = 32.0, 64.0, 1_000, 20


class Counts:
    """One process's connection to the shared counts, whose store can be unavailable; it grants no call."""

    def __init__(self, processes: set["Counts"]) -> None:
        self.processes = processes
        self.is_unavailable = False

    async def ask(self, key_id: str, allowance: Allowance, ask: Ask, timeout_s: float) -> Grant:
        """Reject the call: these tests are about calls while the store is unavailable."""
        await self.check(timeout_s)
        return Grant(num_calls=0, refused_by="rate", wait_s=0.0, tokens=0.0, today=0, day=0)

    async def check(self, timeout_s: float) -> int:
        """Count the process."""
        if self.is_unavailable:
            raise DependencyUnavailable("features", 1.0)
        self.processes.add(self)
        return len(self.processes)

    async def close(self) -> None:
        self.processes.discard(self)


async def admitted(gateways: list[SharedRates], clock: Clock, allowance: Allowance) -> int:
    """Return the number of calls that all gateways admit in AWAY_S if each gets twice the whole rate."""
    num_admitted = 0
    for _ in range(AWAY_S):
        clock.now_s += 1.0
        for gateway in gateways:
            for _ in range(int(2 * RATE)):
                try:
                    await gateway.spend("key", allowance)
                except QuotaExceeded:
                    break
                num_admitted += 1
    return num_admitted


@pytest.mark.parametrize(
    ("num_known", "num_cold", "times"),
    [(2, 0, 1.0), (MOST, 0, 1.0), (2 * MOST, 0, 1.0), (0, MOST, 1.0), (2, MOST - 2, 1 + (MOST - 2) / MOST)],
    ids=["few", "the most", "two clusters", "all start meanwhile", "most start meanwhile"],
)
@pytest.mark.parametrize("limit", ["rate", "quota"])
async def test_all_gateways_admit_the_limit_while_the_store_is_unavailable(
    clock: Clock, limit: str, num_known: int, num_cold: int, times: float
) -> None:
    """Counted gateways divide the limit by their number, gateways started during the outage by 16; each rounds up."""
    allowance = Allowance(rate_per_s=RATE, burst=BURST) if limit == "rate" else Allowance(daily_quota=QUOTA)
    whole = BURST + RATE * AWAY_S if limit == "rate" else QUOTA
    counts: list[Counts] = []
    gateways: list[SharedRates] = []
    processes: set[Counts] = set()
    for num_more, is_unavailable in ((num_known, False), (num_cold, True)):
        for _ in range(num_more):
            counts.append(Counts(processes))
            gateways.append(SharedRates(counts[-1], MOST, clock=clock, wall_clock=lambda: 0.0))
        for counter in counts:
            counter.is_unavailable = is_unavailable
        for seconds in (0.0, PEERS_KEPT_S):
            clock.now_s += seconds
            for gateway in gateways:
                await gateway.settle()

    num_admitted = await admitted(gateways, clock, allowance)

    assert whole * times * 0.95 <= num_admitted <= whole * times + len(gateways)


def test_fewer_processes_are_believed_after_a_while() -> None:
    """A higher process count applies at once, a lower count only after PEERS_KEPT_S."""
    peers = Peers(MOST, 0.0)
    seen = []
    for num, seconds in ((1, 0.1), (3, 0.9), (3, 1.0), (5, 1.1), (1, 1.9), (2, 2.2)):
        peers.reported(num, seconds * PEERS_KEPT_S)
        seen.append(peers.num)

    assert seen == [MOST, MOST, 3, 5, 5, 2]
