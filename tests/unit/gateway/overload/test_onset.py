"""The first second of a flood: gateways with part of a core each, behind an edge that counts."""

import heapq
import random
from dataclasses import dataclass, field
from itertools import count

import pytest

from services.gateway.overload.core_share import CoreShare
from services.gateway.overload.edge_limit import EdgeLimit

DEADLINE_S, SAMPLE_S = 0.2, 0.02
FULL_CPU_S = 0.002
NUM_GATEWAYS = 2


@dataclass
class Gateway:
    """A first-in-first-out process, which knows its requests' processor time."""

    core_share: float
    free_at_s: float = 0.0
    work_cpu_s: float = 0.0
    limit: EdgeLimit = field(default_factory=EdgeLimit)
    learned: CoreShare = field(default_factory=CoreShare)

    def begin(self, now_s: float) -> float:
        """Take a request, and return when it begins."""
        begins_s = max(now_s, self.free_at_s)
        self.free_at_s = begins_s + FULL_CPU_S / self.core_share
        self.work_cpu_s += FULL_CPU_S
        return begins_s

    def sample(self, now_s: float) -> None:
        """Look at the processor time used until now."""
        left_s = max(0.0, self.free_at_s - now_s)
        is_busy = left_s > FULL_CPU_S / self.core_share
        ran_s = self.work_cpu_s - left_s * self.core_share
        self.learned.looked(now_s, ran_s, ran_s / self.core_share, is_busy=is_busy)

    @property
    def headroom(self) -> int:
        """How many requests the gateways work off in the time of a burst."""
        return int(NUM_GATEWAYS * self.limit.headroom_s * self.learned.share / FULL_CPU_S)


def p99_of_a_flood_s(multiple: float, core_share: float) -> float:
    """Return the 99th percentile of how long requests wait to be read, in the mean of five floods."""
    waits_s = [sorted(waits_of_a_flood(multiple, core_share, seed)) for seed in range(5)]
    return sum(run_s[int(0.99 * len(run_s))] for run_s in waits_s) / len(waits_s)


def waits_of_a_flood(multiple: float, core_share: float, seed: int) -> list[float]:
    """Send a multiple of the capacity for a second to gateways that know no flood, and return each request's wait."""
    rng, order, waits_s = random.Random(seed), count(), []
    gateways = [Gateway(core_share) for _ in range(NUM_GATEWAYS)]
    in_flight: list[float] = []
    reads: list[tuple[float, int, Gateway, float, int]] = []
    limit, now_s, sampled_s = gateways[0].limit.announced(1.0, gateways[0].headroom), 1.0, 1.0
    while now_s < 2.0:
        now_s += rng.expovariate(multiple * NUM_GATEWAYS * core_share / FULL_CPU_S)
        while sampled_s + SAMPLE_S <= now_s:
            sampled_s += SAMPLE_S
            for gateway in gateways:
                gateway.sample(sampled_s)
        while in_flight and in_flight[0] <= now_s:
            heapq.heappop(in_flight)
        while reads and reads[0][0] <= now_s:
            read_s, _, gateway, arrived_s, num = heapq.heappop(reads)
            gateway.limit.observed(read_s - arrived_s, num, read_s, gateway.headroom)
            limit = gateway.limit.announced(read_s, gateway.headroom)
        if len(in_flight) >= limit:
            continue
        gateway = rng.choice(gateways)
        begins_s = gateway.begin(now_s)
        waits_s.append(begins_s - now_s)
        heapq.heappush(in_flight, gateway.free_at_s)
        heapq.heappush(reads, (begins_s, next(order), gateway, now_s, len(in_flight)))
    return waits_s


@pytest.mark.parametrize("core_share", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("multiple", [2.0, 5.0, 10.0])
def test_the_first_flood_is_read_within_its_deadline(core_share: float, multiple: float) -> None:
    """The gateways know only a request's cost: the first second uses their capacity, and waits are short."""
    num_read = len(waits_of_a_flood(multiple, core_share, seed=1))

    assert p99_of_a_flood_s(multiple, core_share) <= DEADLINE_S
    assert num_read >= NUM_GATEWAYS * core_share / FULL_CPU_S


def test_with_a_core_assumed_the_first_flood_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processor time as the measure of the wait shows the fault that the share prevents."""
    monkeypatch.setattr(CoreShare, "looked", lambda *_, **__: None)
    monkeypatch.setattr("services.gateway.overload.core_share._FIRST", 1.0)

    assert p99_of_a_flood_s(5.0, 0.25) > DEADLINE_S


def test_only_time_with_work_from_end_to_end_shows_the_share() -> None:
    """0.2 of a core while busy; an idle sample, or the first busy one, shows nothing."""
    learned, first = CoreShare(), CoreShare().share
    for number in range(100):
        learned.looked(float(number), 0.2 * number, number, is_busy=False)
    learned.looked(100.0, 20.0, 100.0, is_busy=True)
    unchanged = learned.share
    for number in range(101, 130):
        learned.looked(float(number), 0.2 * number, number, is_busy=True)

    assert unchanged == first
    assert learned.share == pytest.approx(0.2, abs=0.01)


@pytest.mark.parametrize(("cores", "share"), [(3.0, 1.0), (0.0, 0.1)])
def test_the_share_stays_between_a_tenth_and_a_core(cores: float, share: float) -> None:
    """Threads of the process may use more than a core; a stalled machine gives none."""
    learned = CoreShare()
    for number in range(100):
        learned.looked(float(number), cores * number, number, is_busy=True)

    assert learned.share == pytest.approx(share)


def test_a_stopped_process_learns_nothing() -> None:
    """For a minute it neither runs nor waits for a core, while requests wait: its part of a core is still unknown."""
    learned, first = CoreShare(), CoreShare().share
    for now_s, ran_s in ((0.0, 0.0), (60.0, 0.01), (120.0, 0.02)):
        learned.looked(now_s, ran_s, ran_s, is_busy=True)

    assert learned.share == first


def test_a_share_learned_minutes_ago_is_forgotten() -> None:
    """After a busy time with a tenth of a core, two calm minutes lead back to the first assumption."""
    learned, first = CoreShare(), CoreShare().share
    for number in range(100):
        learned.looked(0.02 * number, 0.002 * number, 0.02 * number, is_busy=True)
    learned_then = learned.share
    learned.looked(122.0, 1.0, 2.0, is_busy=False)

    assert learned_then == pytest.approx(0.1, abs=0.01)
    assert learned.share == pytest.approx(first, abs=0.01)
