"""The report of a look at a canary, as the record of its name holds it: one JSON document, which the judge writes, and command and console read. Pure."""

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from models.documents import Count, Finite

_MAX_REASON_CHARS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardReport:
    """How one guard stands: by which share the candidate is worse, with the interval; None where a number is not finite. `lacks` says what an open guard needs."""

    name: str
    state: str
    worse_by: Finite | None
    low: Finite | None
    high: Finite | None
    lacks: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseReport:
    """What a look found.

    Args:
        act: What followed; empty in a report that is words alone.
        outcome: Of the verdict; empty where there was no control.
        reason: Why, in a sentence.
        stage: The index of the stage.
        share: Its share of the users.
        elapsed_s: Since the stage began.
        users: How many the candidate had, and the live version.
        lists: How many they were shown.
        guards: Each guard's state.
    """

    act: str = ""
    outcome: str = ""
    reason: str
    stage: int = 0
    share: Finite = 0.0
    elapsed_s: int = 0
    users: tuple[Count, Count] = (0, 0)
    lists: tuple[Count, Count] = (0, 0)
    guards: tuple[GuardReport, ...] = ()

    def encode(self) -> str:
        """Return the document, in strict JSON; a long reason is cut, and what is not finite is null."""
        plain = asdict(self) | {"reason": self.reason[:_MAX_REASON_CHARS]}
        guards = [{name: _finite(value) for name, value in one.items()} for one in plain["guards"]]
        return json.dumps(plain | {"guards": guards}, separators=(",", ":"), allow_nan=False)

    @classmethod
    def decode(cls, text: str) -> "ReleaseReport | None":
        """Read a record's report; None where there is none yet. Fields that another version of the judge added are left out; text that is no such document is the reason."""
        if not text:
            return None
        try:
            return _REPORT.validate_json(text, strict=True)
        except ValidationError:
            return cls(reason=text)


_REPORT = TypeAdapter(ReleaseReport)


def _finite(value: Any) -> Any:
    """Return a number as JSON has it, to four places; None for one that is not finite; anything else as it is."""
    if not isinstance(value, float):
        return value
    return round(value, 4) if math.isfinite(value) else None
