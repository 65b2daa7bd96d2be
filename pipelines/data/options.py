"""The options of data: how events are split, and the bounds of the checks before publication."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pipelines.declaration import Option, check_bounds


class SplitKind(StrEnum):
    """How events are divided: each user's last events, or all events after one cut in time."""

    LEAVE_ONE_OUT = "leave-one-out"
    GLOBAL_TIME = "global-time"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """Bounds of the data checks (`pipelines.data.checks`)."""

    min_volume_share: Annotated[
        float,
        Option("Smallest ratio of events, users and items to the live bundle's.", at_least=0, at_most=1),
    ] = 0.8
    max_unusable_share: Annotated[
        float,
        Option(
            "Largest fraction of events set aside for one reason, of recorded and live events each.",
            at_least=0,
            at_most=1,
        ),
    ] = 0.2
    max_drift: Annotated[
        float,
        Option(
            "Largest drift (PSI) of the events since the live bundle; inf for no limit.",
            at_least=0,
            fix="give 0 or more, such as 0.25, or inf for no limit",
        ),
    ] = 0.25

    def __post_init__(self) -> None:
        """Validate the bounds. Raises ConfigError naming the option."""
        check_bounds(self)
