"""Requests that a given tier answers, found by calling the running stack, without reading its stores.

precomputed   users whose list is fresh
llm           known users who want seen items too, which no list covers (`exclude_seen: false`)
student       anonymous visitors who have seen one item: too little for the LLM
popular       unknown users
mixed         the four in turn
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.load.clients import RequestFields, RestClient

TIERS = ("precomputed", "llm", "student", "popular")
K = 10
_PATIENT_MS = 5_000
_ZIPF = 1.1
_FIRST_USERS = (*map(str, range(1, 201)), "nobody")
"""Users of MovieLens-100k, and one whom no stack knows, whose answer names items of any catalogue."""


@dataclass(frozen=True, slots=True)
class Audience:
    """Users and items of the running stack, grouped by the tier that answers them."""

    listed_user_ids: tuple[str, ...]
    known_user_ids: tuple[str, ...]
    item_ids: tuple[str, ...]

    def asks(self, tier: str) -> Callable[[int], RequestFields] | None:
        """Return a function from n to the n-th request that this tier should answer; None if the stack has no such user."""
        match tier:
            case "precomputed" if self.listed_user_ids:
                return lambda n: {"user_id": self.listed_user_ids[n % len(self.listed_user_ids)], "k": K}
            case "llm" if self.known_user_ids:
                return lambda n: {
                    "user_id": self.known_user_ids[n % len(self.known_user_ids)],
                    "k": K,
                    "exclude_seen": False,
                }
            case "student" if self.item_ids:
                return lambda n: {"recent_item_ids": [self.item_ids[n % len(self.item_ids)]], "k": K}
            case "popular":
                return lambda n: {"user_id": f"nobody-{n}", "k": K}
            case "mixed":
                present = [asks for tier in TIERS if (asks := self.asks(tier)) is not None]
                return lambda n: present[n % len(present)](n // len(present))
            case _:
                return None


async def find_audience(rest: RestClient, user_ids: Iterable[str] = _FIRST_USERS) -> Audience:
    """Request once for each of these users, with a long deadline, and group them by the tier that answered."""
    listed, known, items = [], [], dict[str, None]()
    for user_id in user_ids:
        answer = await rest.recommend({"user_id": user_id, "k": K, "deadline_ms": _PATIENT_MS})
        if not answer.is_ok:
            continue
        items.update(dict.fromkeys(answer.item_ids))
        if answer.reason != "unknown_user":
            known.append(user_id)
        if answer.tier == "precomputed":
            listed.append(user_id)
    return Audience(tuple(listed), tuple(known), tuple(items))


class RequestMix:
    """A mix of requests in which every tier has work: `mixed` in turn, or a `long-tail` of few known and many new users."""

    def __init__(self, audience: Audience, num_requests: int, *, is_long_tail: bool = False) -> None:
        self._audience = audience
        self._mixed = audience.asks("mixed")
        self._ranks = _long_tail(len(audience.known_user_ids), num_requests) if is_long_tail else None

    def ask(self, number: int) -> RequestFields:
        """Return request `number`, from 0 to the number of requests."""
        if self._ranks is None:
            assert self._mixed is not None, "`popular` needs no known user"
            return self._mixed(number)
        rank, known = self._ranks[number], self._audience.known_user_ids
        if rank < len(known):
            return {"user_id": known[rank], "k": K}
        if rank % 2 and self._audience.item_ids:
            return {"recent_item_ids": [self._audience.item_ids[rank % len(self._audience.item_ids)]], "k": K}
        return {"user_id": f"stranger-{rank}", "k": K}


def _long_tail(num_known: int, num_requests: int) -> list[int]:
    """Draw users by rank, rank r with weight 1/r**1.1; half of the requests have ranks from `num_known` on, each once: new users."""
    draw = random.Random(0)
    weights = [1 / (rank + 1) ** _ZIPF for rank in range(num_known)]
    ranks = draw.choices(range(num_known + 1), [*weights, sum(weights)], k=num_requests)
    return [num_known + place if rank == num_known else rank for place, rank in enumerate(ranks)]
