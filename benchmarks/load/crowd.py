"""Who asks what: one request per number, mixed so that every tier has something to do.

    mixed       in turn: a known user, a known user who wants seen items too, a visitor with one item, a stranger
    long-tail   few known users again and again, and as many strangers, every second of them with one item

Built on an audience that the running stack told of.
"""

from benchmarks.load.audience import Audience, K
from benchmarks.load.callers import Ask
from benchmarks.load.profiles import long_tail


class Crowd:
    """Return the n-th request."""

    def __init__(self, audience: Audience, num_requests: int, *, is_long_tail: bool = False) -> None:
        self._audience = audience
        self._mixed = audience.asks("mixed")
        self._ranks = long_tail(len(audience.known_user_ids), num_requests) if is_long_tail else None

    def ask(self, number: int) -> Ask:
        """Return request `number`, from 0 to the number of requests."""
        if self._ranks is None:
            assert self._mixed is not None, "there is always somebody nobody knows"
            return self._mixed(number)
        rank, known = self._ranks[number], self._audience.known_user_ids
        if rank < len(known):
            return {"user_id": known[rank], "k": K}
        if rank % 2 and self._audience.item_ids:
            return {"recent_item_ids": [self._audience.item_ids[rank % len(self._audience.item_ids)]], "k": K}
        return {"user_id": f"stranger-{rank}", "k": K}
