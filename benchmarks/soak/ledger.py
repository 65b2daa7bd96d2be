"""Accounts for sent requests: acknowledged events take effect once, refused at most once; answers have explanations."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.features.schema import UserHistory
from services.stream.aggregate import HistoryLimits, apply
from services.stream.decode import LoggedInteraction
from tailrace_client import AsyncClient, TailraceError

_AFTER_S = 2.0
_TRIES = 3
_SPARED_S = 1.0


@dataclass(slots=True)
class Ledger:
    """Event ids by the callers' responses. A refused event may have arrived all the same."""

    acknowledged: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)

    def unlogged(self, logged: Iterable[LoggedInteraction]) -> set[str]:
        return self.acknowledged - {record.interaction.event_id for record in logged}


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The result. `num_lost` counts acknowledged events, `num_doubled` all events.

    `different_rows` are users whose row differs from the log's replay.
    """

    num_acknowledged: int
    num_refused: int
    num_refused_recorded: int
    num_lost: int
    num_doubled: int
    num_users: int
    different_rows: tuple[str, ...]


def account_for(
    ledger: Ledger, logged: Sequence[LoggedInteraction], rows: Mapping[str, UserHistory], limits: HistoryLimits
) -> Account:
    """Compare the callers' responses with the log, and each user's row with the replay of the log in its order."""
    by_user: dict[str, list[LoggedInteraction]] = defaultdict(list)
    for record in logged:
        by_user[record.interaction.user_id].append(record)
    replayed = {user: apply(None, [record.event for record in own], limits).row for user, own in by_user.items()}
    surplus = {
        user: rows[user].num_events - len({record.interaction.event_id for record in own})
        if user in rows
        else -len(own)
        for user, own in by_user.items()
    }
    arrived = {record.interaction.event_id for record in logged}
    return Account(
        num_acknowledged=len(ledger.acknowledged),
        num_refused=len(ledger.refused),
        num_refused_recorded=len(ledger.refused & arrived),
        num_lost=len(ledger.acknowledged - arrived) + sum(max(0, -extra) for extra in surplus.values()),
        num_doubled=sum(max(0, extra) for extra in surplus.values()),
        num_users=len(by_user),
        different_rows=tuple(sorted(user for user, row in replayed.items() if rows.get(user) != row)),
    )


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer whose explanation is read back later. `at_s` is monotonic."""

    request_id: str
    tier: str
    reason: str
    at_s: float


@dataclass(slots=True)
class Explained:
    """Explanations read back some seconds after each answer: matching, missing and different ones.

    Explanations are in Redis, stored some tenths of a second after the answer. Explanations of answers during a fault
    of the store, or by a gateway that dies at once, may be missing, and are counted separately.
    """

    num_agreeing: int = 0
    missing: list[Answered] = field(default_factory=list)
    different: list[str] = field(default_factory=list)

    async def read_back(self, operator: AsyncClient, answered: list[Answered], is_over: asyncio.Event) -> None:
        """Take answers from the list as they become old enough, until it is empty and no more will come."""
        while answered or not is_over.is_set():
            if answered and time.monotonic() - answered[0].at_s >= _AFTER_S:
                await self._compare(operator, answered.pop(0))
            else:
                await asyncio.sleep(0.2)

    async def _compare(self, operator: AsyncClient, answer: Answered) -> None:
        for _ in range(_TRIES):
            try:
                explained = (await operator.explain(answer.request_id)).fields
            except TailraceError:
                await asyncio.sleep(0.5)
                continue
            if (explained["tier"], explained["reason"]) == (answer.tier, answer.reason):
                self.num_agreeing += 1
            else:
                self.different.append(
                    f"{answer.request_id}: {answer.tier} {answer.reason}, explained as {explained['tier']}"
                )
            return
        self.missing.append(answer)

    def fields(self, troubles_s: Sequence[tuple[float, float]]) -> dict[str, Any]:
        """Return the counts; `troubles_s` are the monotonic seconds during which explanations could not be stored."""
        num_excused = sum(
            any(begin - _SPARED_S <= answer.at_s <= end + _SPARED_S for begin, end in troubles_s)
            for answer in self.missing
        )
        return {
            "asked": self.num_agreeing + len(self.different) + len(self.missing),
            "agreeing": self.num_agreeing,
            "different": self.different,
            "missing": len(self.missing) - num_excused,
            "missing_in_faults": num_excused,
        }
