"""Rates and quotas over all gateway processes: counted in Redis, with a lease of calls for each process.

    call ─▶ no limits ─────────────────────────────────▶ admitted
         ─▶ covered by this process's lease ───────────▶ admitted
         ─▶ refused a moment ago ──────────────────────▶ refused
         ─▶ shared counts, one exchange of a few ms ───▶ admitted, with the next lease | refused
         └─▶ shared counts are unavailable ─▶ own counts, this process's share ─▶ admitted | refused, reported later

A process's share is the limit divided by the number of recently counted processes, or by the maximum if that number is
unknown. Together the processes then admit the limits, each rounded up to a call. Processes that start meanwhile add
their small shares, so that all admit less than twice the limits. Owned by one event loop. Does not know how the shared
counts are stored.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil
from typing import Protocol

import structlog

from services.contracts.access import DAY_S, Allowance, Ask, Grant
from services.errors import DependencyUnavailable, QuotaExceeded
from services.gateway.access.rates import Lease, Peers, Rates, RemainingCalls
from services.gateway.periodic_task import PeriodicTask
from services.router.breaker import Breaker, BreakerState

log = structlog.get_logger()

TIMEOUT_S = 0.005
_BLOCKED_S = 0.01
"""A wait exceeding the timeout by this much was caused by this event loop."""
_CHECK_TIMEOUT_S = 1.0
_MAX_FAILURES, _OPEN_S = 3, 0.25
_SETTLE_EVERY_S = 0.25


class SharedCounts(Protocol):
    """The counts that all processes share."""

    async def ask(self, key_id: str, allowance: Allowance, ask: Ask, timeout_s: float) -> Grant:
        """Count. Raises DependencyUnavailable; the call may then have been counted."""
        ...

    async def check(self, timeout_s: float) -> int:
        """Register this process, and return the number of registered processes. Raises DependencyUnavailable."""
        ...

    async def close(self) -> None:
        """Unregister this process and close the connection."""
        ...


@dataclass(frozen=True, slots=True)
class Standing:
    """A key's limits and remaining allowance, as known to this process."""

    allowance: Allowance
    left: RemainingCalls
    now_unix_s: float
    is_shared: bool

    def headers(self) -> dict[str, str]:
        """Return the headers of draft-ietf-httpapi-ratelimit-headers-07: the tightest limit, and all limits."""
        limits = [limit for limit in (self._rate(), self._quota()) if limit is not None]
        nearest = min(limits, key=lambda limit: limit[1])
        counted = "" if self.is_shared else ";counted=replica"
        return {
            "ratelimit-limit": str(nearest[0]),
            "ratelimit-remaining": str(nearest[1]),
            "ratelimit-reset": str(nearest[2]),
            "ratelimit-policy": ", ".join(f"{limit[0]};w={limit[3]}{counted}" for limit in limits),
        }

    def _rate(self) -> tuple[int, int, int, int] | None:
        """Return limit, calls left, seconds to the full bucket, and the seconds that an empty bucket takes to fill."""
        rate, burst = self.allowance.rate_per_s, self.allowance.burst
        if rate is None:
            return None
        tokens = min(burst, self.left.tokens)
        return int(burst), max(0, int(tokens + 1e-9)), max(0, ceil((burst - tokens) / rate)), max(1, ceil(burst / rate))

    def _quota(self) -> tuple[int, int, int, int] | None:
        quota = self.allowance.daily_quota
        if quota is None:
            return None
        return quota, max(0, quota - self.left.today), ceil(DAY_S - self.now_unix_s % DAY_S), DAY_S


class SharedRates:
    """Counts calls by key over all processes; without `counts`, only in this process."""

    def __init__(
        self,
        counts: SharedCounts | None = None,
        num_processes: int = 1,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        on_unavailable: Callable[[bool], None] = lambda _: None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Create the counter.

        Args:
            counts: The shared counts; closed by `stop`.
            num_processes: Maximum number of processes; divides the limits while the shared counts are unavailable and
                have not reported the actual number for some seconds.
            clock: Monotonic.
            wall_clock: Unix time.
            on_unavailable: Called with whether the shared counts are unavailable, at each change.
            timeout_s: How long a call waits for the shared counts.
        """
        self._counts = counts
        self._peers = Peers(num_processes, clock())
        self._clock = clock
        self._wall_clock = wall_clock
        self._on_unavailable = on_unavailable
        self._timeout_s = timeout_s
        self._own = Rates()
        self._own_at_grant: dict[str, int] = {}
        self._leases: dict[str, Lease] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._breaker = Breaker(_MAX_FAILURES, _OPEN_S)
        self.is_unavailable = False
        self._settling = PeriodicTask("rate_counts", self.settle, _SETTLE_EVERY_S)

    async def start(self) -> None:
        """Connect and start settling in the background. Call in the serving loop."""
        if self._counts is not None:
            await self._try_to_reach(self._counts)
            self._settling.start()

    async def stop(self) -> None:
        """Return the unused calls of the leases, and close."""
        if self._counts is not None:
            await self._settling.stop()
            for lease in self._leases.values():
                lease.ends_s = 0.0
            await self.settle()
            await self._counts.close()

    async def spend(self, key_id: str, allowance: Allowance, cost: int = 1) -> Standing:
        """Count a call. Raises QuotaExceeded with the time to the next permitted call."""
        lease = self._lease_of(key_id, allowance)
        if self._counts is None:
            return self._spend_alone(key_id, lease, cost)
        if (standing := self._spend_here(key_id, lease, cost)) is not None:
            return standing
        async with self._locks.setdefault(key_id, asyncio.Lock()):
            lease = self._lease_of(key_id, allowance)
            if (standing := self._spend_here(key_id, lease, cost)) is not None:
                return standing
            ask = lease.ask(cost, self._clock())
            grant = await self._exchange(self._counts, key_id, lease, ask)
            if grant is None:
                return self._spend_alone(key_id, lease, cost)
            if not lease.answered(ask, grant, self._clock()):
                raise self._refusal(lease, cost)
            return self._granted(key_id, lease, cost)

    def give_back(self, key_id: str, cost: int) -> None:
        if (lease := self._leases.get(key_id)) is not None:
            lease.num_calls += cost if self._counts is not None else 0
            self._own.note(key_id, self._share_of(key_id, lease), self._wall_clock(), self._clock(), -cost)

    def standing_of(self, key_id: str, allowance: Allowance) -> Standing:
        """Return the key's remaining allowance, for a refused call."""
        lease, now_unix_s = self._lease_of(key_id, allowance), self._wall_clock()
        if lease.grant is not None and self._breaker.state(self._clock()) is BreakerState.CLOSED:
            left = RemainingCalls(lease.grant.tokens + lease.num_calls, lease.grant.today - lease.num_calls)
            return Standing(allowance, left, now_unix_s, is_shared=True)
        share = self._share_of(key_id, lease)
        return Standing(share, self._own.left(key_id, share, now_unix_s, self._clock()), now_unix_s, is_shared=False)

    async def settle(self) -> None:
        """Report calls that no exchange will report soon, and fetch the counts of each key and the number of processes.

        While the store is unavailable, try to connect.
        """
        if self._counts is None:
            return
        if self._breaker.state(self._clock()) is BreakerState.CLOSED:
            with suppress(DependencyUnavailable):  # the calls notice
                await self._count_peers(self._counts)
        else:
            await self._try_to_reach(self._counts)
            if self._breaker.state(self._clock()) is not BreakerState.CLOSED:
                return
        for key_id, lease in tuple(self._leases.items()):
            async with self._locks.setdefault(key_id, asyncio.Lock()):
                if lease.needs_settling(self._clock()):
                    ask = lease.ask(0, self._clock())
                    if (grant := await self._exchange(self._counts, key_id, lease, ask)) is not None:
                        lease.answered(ask, grant, self._clock())

    def _lease_of(self, key_id: str, allowance: Allowance) -> Lease:
        """Return the key's lease, updated to its current limits."""
        lease = self._leases.get(key_id)
        if lease is None:
            lease = self._leases[key_id] = Lease(allowance, self._clock(), self._clock())
        elif lease.allowance is not allowance and lease.allowance != allowance:
            lease.allowance, lease.hold, lease.ends_s = allowance, None, 0.0
        return lease

    def _spend_here(self, key_id: str, lease: Lease, cost: int) -> Standing | None:
        """Take the call from the lease, or refuse it under a hold; None if the shared counts must be asked."""
        now_s = self._clock()
        if lease.take(cost, now_s):
            return self._granted(key_id, lease, cost)
        if lease.hold_on(cost, now_s) is not None:
            raise self._refusal(lease, cost)
        return None

    async def _exchange(self, counts: SharedCounts, key_id: str, lease: Lease, ask: Ask) -> Grant | None:
        """Ask the shared counts; None if they are unavailable."""
        started_s = self._clock()
        if self._breaker.state(started_s) is not BreakerState.CLOSED:
            lease.unanswered(ask)
            return None
        try:
            grant = await counts.ask(key_id, lease.allowance, ask, self._timeout_s)
        except asyncio.CancelledError:
            lease.unanswered(ask)
            raise
        except DependencyUnavailable as error:
            lease.unanswered(ask)
            now_s = self._clock()
            if not (isinstance(error.__cause__, TimeoutError) and now_s - started_s > self._timeout_s + _BLOCKED_S):
                self._breaker.failed(now_s)
                self._report_if_unavailable(repr(error.__cause__))
            return None
        self._breaker.succeeded()
        self._own_at_grant[key_id] = self._own.today(key_id, self._wall_clock())
        return grant

    async def _try_to_reach(self, counts: SharedCounts) -> None:
        """Connect outside of any call, since connecting takes longer than a call may wait."""
        try:
            await self._count_peers(counts)
        except DependencyUnavailable as error:
            for _ in range(_MAX_FAILURES):
                self._breaker.failed(self._clock())
            self._report_if_unavailable(repr(error.__cause__))
        else:
            if self.is_unavailable:
                log.info("rate_counts_back")
            self._breaker.succeeded()
            self.is_unavailable = False
            self._on_unavailable(False)

    async def _count_peers(self, counts: SharedCounts) -> None:
        """Register this process and record the number of processes. Raises DependencyUnavailable."""
        self._peers.reported(await counts.check(_CHECK_TIMEOUT_S), self._clock())

    def _report_if_unavailable(self, why: str) -> None:
        if not self.is_unavailable and self._breaker.state(self._clock()) is not BreakerState.CLOSED:
            self.is_unavailable = True
            self._on_unavailable(True)
            log.warning("rate_counts_unavailable", why=why)

    def _spend_alone(self, key_id: str, lease: Lease, cost: int) -> Standing:
        """Count in this process only."""
        now_unix_s, share = self._wall_clock(), self._share_of(key_id, lease)
        left = self._own.spend(key_id, share, now_unix_s, self._clock(), cost)
        lease.spent_alone += cost
        return Standing(share, left, now_unix_s, is_shared=False)

    def _share_of(self, key_id: str, lease: Lease) -> Allowance:
        """Return this process's share of the rate, and of the day's last known remaining quota."""
        share, quota = lease.allowance.shared_by(self._peers.num), lease.allowance.daily_quota
        if quota is None or lease.grant is None or lease.grant.day != self._wall_clock() // DAY_S:
            return share
        left = -(-max(0, quota - lease.grant.today) // self._peers.num)
        return replace(share, daily_quota=self._own_at_grant.get(key_id, 0) + left)

    def _granted(self, key_id: str, lease: Lease, cost: int) -> Standing:
        now_unix_s, grant = self._wall_clock(), lease.grant
        assert grant is not None, "a lease has calls only from a grant"
        self._own.note(key_id, lease.allowance.shared_by(self._peers.num), now_unix_s, self._clock(), cost)
        left = RemainingCalls(grant.tokens + lease.num_calls, grant.today - lease.num_calls)
        return Standing(lease.allowance, left, now_unix_s, is_shared=True)

    def _refusal(self, lease: Lease, cost: int) -> QuotaExceeded:
        now_s = self._clock()
        hold = lease.hold_on(cost, now_s) or lease.hold
        assert hold is not None, "only called after a refusal"
        return QuotaExceeded(hold.refused_by, max(0.001, hold.back_at_s - now_s))
