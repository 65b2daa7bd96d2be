"""When which fault comes and goes: a seeded order in which every kind appears before any appears again. Pure."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

CALM_S = 20.0
"""Seconds without a fault at the beginning and at the end."""
_SHORTEST_S, _LONGEST_S = 4.0, 10.0


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """One fault: its name, seconds from the start of the load, and how long it lasts at least."""

    name: str
    at_s: float
    lasts_s: float


def plan_faults(names: Sequence[str], total_s: float, every_s: float, seed: int) -> list[PlannedFault]:
    """Return a fault every `every_s` seconds, in order; the same for the same seed."""
    draw = random.Random(seed)
    order = _endless(names, draw)
    starts = range(max(0, int((total_s - 2 * CALM_S) // every_s)))
    return [
        PlannedFault(next(order), CALM_S + start * every_s, draw.uniform(_SHORTEST_S, min(_LONGEST_S, every_s / 2)))
        for start in starts
    ]


def _endless(names: Sequence[str], draw: random.Random) -> Iterator[str]:
    while True:
        yield from draw.sample(names, len(names))
