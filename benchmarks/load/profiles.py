"""Load profiles: when requests depart. Pure.

steady      evenly spaced at the rate
spike       steady, plus twelve times the rate at low priority in the middle third
diurnal     one day compressed into the duration: from a quarter of the rate at night to 1.75 times at noon
long-tail   steady, by users of whom a few return often and most appear once
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

SPIKE_FACTOR = 12
_DIURNAL_SWING = 0.75
_ZIPF = 1.1


class Profile(StrEnum):
    """The load profiles."""

    STEADY = "steady"
    SPIKE = "spike"
    DIURNAL = "diurnal"
    LONG_TAIL = "long-tail"


@dataclass(frozen=True, slots=True, order=True)
class Departure:
    """One request: seconds from the start, and whether it belongs to the spike."""

    at_s: float
    is_spike: bool = False


def departures(profile: Profile, rate_rps: float, duration_s: float) -> list[Departure]:
    """Return all departures in order. The mean rate is `rate_rps`, not counting the spike's own requests."""
    if profile is Profile.DIURNAL:
        return [Departure(at_s) for at_s in _diurnal(rate_rps, duration_s)]
    base = [Departure(at_s) for at_s in _evenly(rate_rps, 0.0, duration_s)]
    if profile is not Profile.SPIKE:
        return base
    wave = _evenly(SPIKE_FACTOR * rate_rps, duration_s / 3, 2 * duration_s / 3)
    return sorted(base + [Departure(at_s, is_spike=True) for at_s in wave])


def long_tail(num_heads: int, num_requests: int, seed: int = 0) -> list[int]:
    """Draw users by rank, rank r with weight 1/r**1.1. Ranks from `num_heads` on are new users."""
    weights = [1 / (rank + 1) ** _ZIPF for rank in range(num_heads)]
    tail = sum(weights)  # as many requests by new users as by known ones
    draw = random.Random(seed)
    ranks = draw.choices(range(num_heads + 1), [*weights, tail], k=num_requests)
    newcomers = iter(range(num_heads, num_heads + num_requests))
    return [next(newcomers) if rank == num_heads else rank for rank in ranks]


def _evenly(rate_rps: float, from_s: float, to_s: float) -> Iterator[float]:
    return (from_s + number / rate_rps for number in range(round(rate_rps * (to_s - from_s))))


def _diurnal(rate_rps: float, duration_s: float) -> Iterator[float]:
    """Place request n where the integral of the rate reaches n."""
    omega = 2 * math.pi / duration_s

    def sent_by(at_s: float) -> float:
        return rate_rps * (at_s - _DIURNAL_SWING * math.sin(omega * at_s) / omega)

    for number in range(round(rate_rps * duration_s)):
        low_s, high_s = 0.0, duration_s
        while high_s - low_s > 1e-6:
            middle_s = (low_s + high_s) / 2
            low_s, high_s = (middle_s, high_s) if sent_by(middle_s) < number else (low_s, middle_s)
        yield high_s
