"""Reads the explanations of answers back, some seconds after each answer, and compares them with what the caller was told.

Explanations are in Redis and each gateway stores them some tenths of a second after the answer. So those of answers during a fault of
the store, or by a gateway that dies at once, may be missing: they are asked for as well, and counted apart.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.soak.traffic import Answered
from tailrace_client import AsyncClient, TailraceError

_AFTER_S = 2.0
_TRIES = 3
_SPARED_S = 1.0


@dataclass(slots=True)
class Explained:
    """What was read back: answers whose explanation agrees, and those without one or with another, by when they were given."""

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
        """Return the counts; `troubles_s` are the monotonic seconds in which explanations could not be stored."""
        num_excused = sum(
            any(begin - _SPARED_S <= one.at_s <= end + _SPARED_S for begin, end in troubles_s) for one in self.missing
        )
        return {
            "asked": self.num_agreeing + len(self.different) + len(self.missing),
            "agreeing": self.num_agreeing,
            "different": self.different,
            "missing": len(self.missing) - num_excused,
            "missing_in_faults": num_excused,
        }
