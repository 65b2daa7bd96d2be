"""One process's counts of calls by key: all of them, and those granted ahead by the counts that all processes share.

    Rates   a token bucket for a key's rate, a count for its day (UTC): decides while the shared counts are unavailable
    Peers   how many processes share a key's limits: divides them meanwhile
    Lease   calls that the shared counts granted this process for the next tenth of a second

Pure: the time is an argument. A refused call uses nothing. `shared_rates` decides which applies.
"""

from dataclasses import dataclass

from services.contracts.access import DAY_S, QUOTA, RATE, WHOLE, Allowance, Ask, Grant
from services.errors import QuotaExceeded

REFRESH_S, IDLE_S = 1.0, 60.0
"""How often a process asks how a key stands that it has seen lately: it must know that when the shared counts become unavailable."""
LEASE_S = 0.1
"""How long a lease lasts, and for how long a caller's calls are granted ahead."""
MIN_HOLD_S, MAX_HOLD_S = 0.02, 1.0
"""How long no exchange is made after a refusal: long enough for several calls to become due, short enough to notice what other processes return."""


PEERS_KEPT_S = 10.0
"""For how long a larger number of peers is kept when fewer are reported: processes that start, or a store that was emptied, are counted one by one."""


@dataclass(frozen=True, slots=True)
class Remaining:
    """What a key has left: `tokens` in its bucket (a full one without a rate), and its calls of the day so far."""

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

    def spend(self, key_id: str, allowance: Allowance, now_unix_s: float, now_s: float, cost: int = 1) -> Remaining:
        """Count a call. Raises QuotaExceeded with the time to the next permitted one. `now_s` is monotonic, for the rate."""
        used = self._brought_up(key_id, allowance, now_unix_s, now_s)
        needed = min(cost, allowance.burst)  # a call that costs more than this process's share needs a full bucket
        if used.tokens < needed - WHOLE:
            raise QuotaExceeded(RATE, (needed - used.tokens) / (allowance.rate_per_s or 1.0))
        if allowance.daily_quota is not None and used.today + cost > allowance.daily_quota:
            raise QuotaExceeded(QUOTA, (used.day + 1) * DAY_S - now_unix_s)
        used.tokens -= cost
        used.today += cost
        return Remaining(max(0.0, used.tokens), used.today)

    def left(self, key_id: str, allowance: Allowance, now_unix_s: float, now_s: float) -> Remaining:
        """Return what the key has left."""
        used = self._brought_up(key_id, allowance, now_unix_s, now_s)
        return Remaining(max(0.0, used.tokens), used.today)

    def note(self, key_id: str, allowance: Allowance, now_unix_s: float, now_s: float, cost: int) -> None:
        """Count a call that was permitted elsewhere."""
        used = self._brought_up(key_id, allowance, now_unix_s, now_s)
        used.tokens = max(0.0, used.tokens - cost)
        used.today += cost

    def today(self, key_id: str, now_unix_s: float) -> int:
        """Return the calls of this day so far."""
        used = self._used.get(key_id)
        return 0 if used is None or used.day != int(now_unix_s // DAY_S) else used.today

    def _brought_up(self, key_id: str, allowance: Allowance, now_unix_s: float, now_s: float) -> _Used:
        """Return the key's counts with the tokens of this time; a full bucket when there is no rate."""
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
    """How many processes share a key's limits, this one included; to begin with the most that there may be."""

    num: int
    at_s: float

    def reported(self, num: int, now_s: float) -> None:
        """Take a report: more at once, fewer after PEERS_KEPT_S."""
        if num >= self.num or now_s - self.at_s >= PEERS_KEPT_S:
            self.num, self.at_s = num, now_s


@dataclass(frozen=True, slots=True)
class Hold:
    """Calls of this cost or more are refused before `until_s` without asking; their Retry-After is taken from `back_at_s` (both monotonic)."""

    refused_by: str
    cost: int
    until_s: float
    back_at_s: float


@dataclass(slots=True)
class Lease:
    """One key's calls that this process may let through without asking.

        ask ─▶ granted: n calls ─▶ taken one by one ─▶ used up, or over ─▶ ask again, and give back what is left
           └─▶ refused: a hold, and nobody asks again before it is over

    A slow caller's lease holds its one call, so the shared count is exact; one with hundreds of calls a second asks ten times a
    second. `spent_alone` are calls let through without asking, which the shared counts still have to learn of.
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
        """Take calls out of the lease; False if it does not have them."""
        self.used_at_s = now_s
        if self.num_calls < cost or now_s >= self.ends_s:
            return False
        self.num_calls -= cost
        self._num_taken += cost
        return True

    def hold_on(self, cost: int, now_s: float) -> Hold | None:
        """Return the hold by which a call of this cost is refused now."""
        hold = self.hold
        return hold if hold is not None and cost >= hold.cost and now_s < hold.until_s else None

    def ask(self, cost: int, now_s: float) -> Ask:
        """Return what to ask for a call that was not taken, and take note that it is asked."""
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
        """The exchange failed: the next one reports the same. If Redis counted it all the same, the key has less, not more."""
        self.spent_alone += ask.spent
        self.num_calls += ask.unspent

    def needs_settling(self, now_s: float) -> bool:
        """Whether there are counts to report or to fetch that no call will exchange soon."""
        is_outdated = now_s - self.asked_at_s >= REFRESH_S and now_s - self.used_at_s < IDLE_S
        return self.spent_alone > 0 or is_outdated or (self.num_calls > 0 and now_s >= self.ends_s)
