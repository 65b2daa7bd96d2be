"""One process's counts of calls by key: its own, and the calls granted in advance by the shared counts.

    Rates   a token bucket for a key's rate, a count for its day (UTC): decides while the shared counts are unavailable
    Peers   number of processes that share a key's limits: divides them meanwhile
    Lease   calls that the shared counts granted this process for the next tenth of a second

Pure: time is an argument. A refused call uses nothing. `shared_rates` decides which one applies.
"""

from dataclasses import dataclass

from services.contracts.access import DAY_S, QUOTA, RATE, WHOLE, Allowance, Ask, Grant
from services.errors import QuotaExceeded

REFRESH_S, IDLE_S = 1.0, 60.0
"""How often a process fetches the state of recently used keys, which it needs when the shared counts become
unavailable."""
LEASE_S = 0.1
"""Duration of a lease: the calls of this time are granted in advance."""
MIN_HOLD_S, MAX_HOLD_S = 0.02, 1.0
"""Pause between exchanges after a refusal: long enough for several calls to become due, short enough to see what other
processes return."""


PEERS_KEPT_S = 10.0
"""How long a larger peer count is kept when fewer are reported: after a start or an emptied store, peers register one
by one."""


@dataclass(frozen=True, slots=True)
class RemainingCalls:
    """Remaining allowance of a key: `tokens` in its bucket (full without a rate), and its calls so far today."""

    tokens: float
    today: int


@dataclass(slots=True)
class _Used:
    """The tokens left in one key's bucket, and its calls of the day."""

    tokens: float
    at_s: float
    day: int
    today: int = 0


class Rates:
    """Counts calls by key. Owned by one event loop."""

    def __init__(self) -> None:
        self._used: dict[str, _Used] = {}

    def spend(
        self, key_id: str, allowance: Allowance, now_unix_s: float, now_s: float, cost: int = 1
    ) -> RemainingCalls:
        """Count a call. Raises QuotaExceeded with the time to the next permitted call.

        `now_s` is monotonic, for the rate.
        """
        used = self._brought_up(key_id, allowance, now_unix_s, now_s)
        needed = min(cost, allowance.burst)  # a call that costs more than this process's share needs a full bucket
        if used.tokens < needed - WHOLE:
            raise QuotaExceeded(RATE, (needed - used.tokens) / (allowance.rate_per_s or 1.0))
        if allowance.daily_quota is not None and used.today + cost > allowance.daily_quota:
            raise QuotaExceeded(QUOTA, (used.day + 1) * DAY_S - now_unix_s)
        used.tokens -= cost
        used.today += cost
        return RemainingCalls(max(0.0, used.tokens), used.today)

    def left(self, key_id: str, allowance: Allowance, now_unix_s: float, now_s: float) -> RemainingCalls:
        """Return the key's remaining allowance."""
        used = self._brought_up(key_id, allowance, now_unix_s, now_s)
        return RemainingCalls(max(0.0, used.tokens), used.today)

    def note(self, key_id: str, allowance: Allowance, now_unix_s: float, now_s: float, cost: int) -> None:
        """Count a call that the shared counts permitted."""
        used = self._brought_up(key_id, allowance, now_unix_s, now_s)
        used.tokens = max(0.0, used.tokens - cost)
        used.today += cost

    def today(self, key_id: str, now_unix_s: float) -> int:
        """Return the calls of this day so far."""
        used = self._used.get(key_id)
        return 0 if used is None or used.day != int(now_unix_s // DAY_S) else used.today

    def _brought_up(self, key_id: str, allowance: Allowance, now_unix_s: float, now_s: float) -> _Used:
        """Return the key's counts with the tokens refilled up to now; a full bucket without a rate."""
        day = int(now_unix_s // DAY_S)
        used = self._used.get(key_id)
        if used is None:
            used = self._used[key_id] = _Used(allowance.burst, now_s, day)
        elif used.day != day:
            used.day, used.today = day, 0
        gained = 0.0 if allowance.rate_per_s is None else max(0.0, now_s - used.at_s) * allowance.rate_per_s
        used.tokens = allowance.burst if allowance.rate_per_s is None else min(allowance.burst, used.tokens + gained)
        used.at_s = now_s
        return used


@dataclass(slots=True)
class Peers:
    """Number of processes that share a key's limits, including this process; initially the maximum."""

    num: int
    at_s: float

    def reported(self, num: int, now_s: float) -> None:
        """Take a report: an increase at once, a decrease after PEERS_KEPT_S."""
        if num >= self.num or now_s - self.at_s >= PEERS_KEPT_S:
            self.num, self.at_s = num, now_s


@dataclass(frozen=True, slots=True)
class Hold:
    """Calls of at least this cost are refused without an exchange before `until_s`.

    Retry-After counts to `back_at_s` (both monotonic).
    """

    refused_by: str
    cost: int
    until_s: float
    back_at_s: float


@dataclass(slots=True)
class Lease:
    """One key's calls that this process may admit without an exchange.

        ask ─▶ granted: n calls ─▶ taken one by one ─▶ used up or expired ─▶ ask again, return the rest
           └─▶ refused: a hold; no exchange before it ends

    A slow caller's lease holds only its current call, so the shared count is exact; a caller with hundreds of calls a
    second causes ten exchanges a second. `spent_alone` counts calls admitted without an exchange, to be reported to the
    shared counts.
    """

    allowance: Allowance
    asked_at_s: float
    used_at_s: float
    num_calls: int = 0
    ends_s: float = 0.0
    spent_alone: int = 0
    hold: Hold | None = None
    grant: Grant | None = None
    _num_taken: int = 0

    def take(self, cost: int, now_s: float) -> bool:
        """Take calls from the lease; False if it has too few."""
        self.used_at_s = now_s
        if self.num_calls < cost or now_s >= self.ends_s:
            return False
        self.num_calls -= cost
        self._num_taken += cost
        return True

    def hold_on(self, cost: int, now_s: float) -> Hold | None:
        """Return the hold that refuses a call of this cost now, if any."""
        hold = self.hold
        return hold if hold is not None and cost >= hold.cost and now_s < hold.until_s else None

    def ask(self, cost: int, now_s: float) -> Ask:
        """Return the request to the shared counts for a call that was not taken, and mark it as sent."""
        elapsed_s = max(now_s - self.asked_at_s, LEASE_S / 10)
        batch = int(self._num_taken / elapsed_s * LEASE_S) if cost > 0 else 0
        ask = Ask(
            cost=cost,
            batch=batch,
            spent=self.spent_alone,
            unspent=self.num_calls,
            taken_on=0 if self.grant is None else self.grant.day,
        )
        self.num_calls = self.spent_alone = self._num_taken = 0
        self.asked_at_s = now_s
        return ask

    def answered(self, ask: Ask, grant: Grant, now_s: float) -> bool:
        """Take the answer; return whether the call is granted."""
        self.grant = grant
        if grant.num_calls < ask.cost:
            hold_s = min(MAX_HOLD_S, max(MIN_HOLD_S, grant.wait_s))
            back_at_s = now_s + max(hold_s, grant.wait_s)
            self.hold = Hold(grant.refused_by, ask.cost, now_s + hold_s, back_at_s)
            return False
        self.num_calls += grant.num_calls - ask.cost
        self._num_taken = ask.cost
        self.ends_s = now_s + LEASE_S
        return True

    def unanswered(self, ask: Ask) -> None:
        """Restore the counts after a failed exchange: the next one reports them again.

        If Redis counted it anyway, the key has less, not more.
        """
        self.spent_alone += ask.spent
        self.num_calls += ask.unspent

    def needs_settling(self, now_s: float) -> bool:
        """Whether counts must be reported or fetched that no call will exchange soon."""
        is_outdated = now_s - self.asked_at_s >= REFRESH_S and now_s - self.used_at_s < IDLE_S
        return self.spent_alone > 0 or is_outdated or (self.num_calls > 0 and now_s >= self.ends_s)
