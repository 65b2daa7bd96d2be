"""The report of a canary analysis, stored in the record of its name as one JSON document.

The canary analysis writes it; the command line and the console read it. Pure.
"""

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from models.documents import Count, Finite

_MAX_REASON_CHARS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardReport:
    """State of one guard: the candidate's relative loss with its interval; None for numbers that are not finite.

    `lacks` states the missing data of an undecided guard.
    """

    name: str
    state: str
    worse_by: Finite | None
    low: Finite | None
    high: Finite | None
    lacks: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseReport:
    """Result of one analysis.

    Args:
        act: The action taken; empty in a report that is only text.
        outcome: The analysis result; empty without a control group.
        reason: The reason, as a sentence.
        stage: Index of the stage.
        share: Traffic fraction of the stage.
        elapsed_s: Seconds since the stage began.
        users: Number of users of the candidate, and of the live version.
        lists: Number of lists shown to them.
        guards: State of each guard.
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
        """Return the document in strict JSON; a long reason is truncated, and non-finite numbers are null."""
        plain = asdict(self) | {"reason": self.reason[:_MAX_REASON_CHARS]}
        guards = [{name: _finite(value) for name, value in guard.items()} for guard in plain["guards"]]
        return json.dumps(plain | {"guards": guards}, separators=(",", ":"), allow_nan=False)

    @classmethod
    def decode(cls, text: str) -> "ReleaseReport | None":
        """Read a record's report; None if there is none yet.

        Unknown fields, which another version may have written, are ignored; text that is not such a document becomes
        the reason.
        """
        if not text:
            return None
        try:
            return _REPORT.validate_json(text, strict=True)
        except ValidationError:
            return cls(reason=text)


_REPORT = TypeAdapter(ReleaseReport)


def _finite(value: Any) -> Any:
    """Return a number rounded to four places for JSON, None if it is not finite; any other value unchanged."""
    if not isinstance(value, float):
        return value
    return round(value, 4) if math.isfinite(value) else None
