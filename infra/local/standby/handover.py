"""Who answers at the doors, Ray's HAProxy or the standby: a pure state machine.

    ON DUTY --HAProxy well at RETURN_LOOKS looks in a row--> off duty
    off duty --HAProxy gone, silent or without a gateway at one look--> ON DUTY

No clock, no sockets: what was seen is an argument. Knows nothing of how connections are led to either.
"""

from dataclasses import dataclass
from enum import StrEnum

RETURN_LOOKS = 3
"""One good look may be of a HAProxy that is about to be told of an empty list of gateways."""


class Main(StrEnum):
    """How Ray's HAProxy is."""

    GONE = "gone"
    UNWELL = "unwell"
    WELL = "well"


@dataclass(frozen=True, slots=True, kw_only=True)
class Duty:
    """Whether the standby answers, and how often in a row HAProxy was well. Before the first look nobody else is known."""

    is_on: bool = True
    num_well: int = 0


def advance(duty: Duty, main: Main) -> Duty:
    """Return the next state."""
    if main is not Main.WELL:
        return Duty(is_on=True, num_well=0)
    num_well = min(duty.num_well + 1, RETURN_LOOKS)
    return Duty(is_on=duty.is_on and num_well < RETURN_LOOKS, num_well=num_well)
