"""Requests that a given tier answers, found by calling the running stack, without reading its stores.

precomputed   users whose list is fresh
llm           known users who want seen items too, which no list covers (`exclude_seen: false`)
student       anonymous visitors who have seen one item: too little for the LLM
popular       unknown users
mixed         the four in turn
"""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from benchmarks.load.clients import Caller, LoadClient, RequestFields, RestClient
from benchmarks.load.open_loop import RequestOutcome, Send

TIERS = ("precomputed", "llm", "student", "popular")
K = 10
_PATIENT_MS = 5_000
_FIRST_USERS = (*map(str, range(1, 201)), "nobody")
"""Users of MovieLens-100k, and an unknown user, whose answer names items of any catalogue."""


@dataclass(frozen=True, slots=True)
class Audience:
    """Users and items of the running stack, grouped by the tier that answers them."""

    listed_user_ids: tuple[str, ...]
    known_user_ids: tuple[str, ...]
    item_ids: tuple[str, ...]

    def asks(self, tier: str) -> Callable[[int], RequestFields] | None:
        """Return a function from n to the n-th request for this tier; None if the stack has no such user."""
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
                return self.mixed
            case _:
                return None

    def mixed(self, number: int) -> RequestFields:
        """Return request `number` of a mix that gives every tier work, taking the tiers in turn."""
        present = [asks for tier in TIERS if (asks := self.asks(tier)) is not None]
        return present[number % len(present)](number // len(present))


def sender(caller: Caller | LoadClient, asks: Callable[[int], RequestFields], deadline_ms: int) -> Send:
    """Return a function that sends the n-th of these requests with this deadline."""

    def send(number: int) -> Awaitable[RequestOutcome]:
        return caller.recommend({**asks(number), "deadline_ms": deadline_ms})

    return send


async def find_audience(rest: RestClient, user_ids: Iterable[str] = _FIRST_USERS) -> Audience:
    """Request once for each of these users, with a long deadline, and group them by the tier of the answer."""
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
