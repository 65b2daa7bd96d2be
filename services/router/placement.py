"""Which replicas a model's requests go to, where replicas hold some of many models. Pure: time is an argument.

A name has an order of all replicas that does not change while the replicas do not (highest random weight), and its
requests go to the first replicas of this order, its homes. All gateways agree on them without talking to each other. A
name has one home, and gets another when the requests in flight exceed what its homes should hold; it loses that home
when the remaining ones would be half full for some seconds. Within the homes a session keeps its replica. A replica
that hangs or fails stops being a home. While a home loads the model, requests go to the homes that have loaded it,
else to any replica that has; so after a restart the previous homes answer until the new ones can.
"""

import hashlib
import math
from collections.abc import Collection, Sequence

_AVERAGED_S = 1.0
"""Time constant of the average of requests in flight."""
_GROW_S, _SHRINK_S = 1.0, 5.0
"""Least time between two additional homes, and between a low load and the loss of a home."""
_RETRY_S = 0.5
"""A replica that was loading the model is avoided for this long."""


class Placement:
    """The homes of one name."""

    def __init__(self, name: str, load_per_home: float) -> None:
        """`load_per_home` is the number of requests in flight above which a name gets another home."""
        self._name = name
        self._load_per_home = load_per_home
        self._mean_load = 0.0
        self._observed_s = -math.inf
        self._grown_s = self._needed_s = -math.inf
        self._loading_until_s: dict[str, float] = {}
        self._holders: set[str] = set()
        self._known: tuple[str, ...] = ()
        self._by_name: list[str] = []
        """`_known` in the name's order, which is computed when replicas change."""
        self.num_homes = 1

    def observe(self, num_in_flight: int, num_replicas: int, now_s: float) -> None:
        """Record the requests of this name in flight now, and change the number of homes."""
        kept = math.exp(-(now_s - self._observed_s) / _AVERAGED_S)
        self._mean_load = kept * self._mean_load + (1 - kept) * num_in_flight
        self._observed_s = now_s
        if self._mean_load > 0.5 * self._load_per_home * (self.num_homes - 1):
            self._needed_s = now_s
        if self._mean_load > self._load_per_home * self.num_homes and now_s - self._grown_s >= _GROW_S:
            self.num_homes += 1
            self._grown_s = now_s
        elif now_s - self._needed_s >= _SHRINK_S:
            self.num_homes -= 1
            self._needed_s = now_s
        self.num_homes = max(1, min(self.num_homes, num_replicas))

    def order(self, session: str, replicas: Sequence[str], answering: Collection[str], now_s: float) -> list[str]:
        """Return the replicas for a session in the order of attempts; `answering` neither hang nor fail."""
        if self._known != (known := tuple(replicas)):
            self._known, self._by_name = known, sorted(known, key=lambda replica: _weight(self._name, replica))
            self._holders &= set(known)
        self._loading_until_s = {name: until_s for name, until_s in self._loading_until_s.items() if until_s > now_s}
        able = [replica for replica in self._by_name if replica in answering] or self._by_name
        homes = able[: self.num_homes]
        ready = [replica for replica in homes if replica not in self._loading_until_s]
        chosen = ready or [replica for replica in able if replica in self._holders] or homes
        return sorted(chosen, key=lambda replica: _weight(session, replica))

    def loading(self, replica: str, now_s: float) -> None:
        """Record that a replica refused a request because it is loading the model."""
        self._loading_until_s[replica] = now_s + _RETRY_S
        self._holders.discard(replica)

    def answered(self, replica: str) -> None:
        """Record that a replica answered with the model."""
        self._loading_until_s.pop(replica, None)
        self._holders.add(replica)


def _weight(key: str, replica: str) -> bytes:
    return hashlib.blake2b(f"{key}\0{replica}".encode(), digest_size=8).digest()
