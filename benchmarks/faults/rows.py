"""A row of the fault matrix: its phases, its requests, and its results. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.faults.event_probe import EventProbe
from benchmarks.load.open_loop import Load, Shot
from benchmarks.load.scoring import answers_recovered_s, degraded_share, summarise
from services.contracts.access import Priority

DEADLINE_MS = 200
_SPIKE_FACTOR = 12
_DOORS = ("REST", "gRPC")
_HIGH_OF = 4
"""One in this many requests has normal priority, the rest high; the position shifts, as the mix of tiers repeats."""


@dataclass(frozen=True, slots=True)
class Phases:
    """Durations of a row's healthy, broken and recovery phases."""

    before_s: float = 8.0
    during_s: float = 14.0
    after_s: float = 18.0

    @property
    def mended_at_s(self) -> float:
        """The time at which the fault ends."""
        return self.before_s + self.during_s

    @property
    def total_s(self) -> float:
        """The time over which requests depart."""
        return self.mended_at_s + self.after_s


PHASES = Phases()
"""Phases of the published matrix."""
NODE_PHASES = Phases(before_s=8.0, during_s=20.0, after_s=42.0)
"""Longer phases, for a cluster: a row has a thousand requests at a lower rate."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One request of a row."""

    at_s: float
    priority: Priority


def plan_row(rate_rps: float, phases: Phases, *, is_spike: bool) -> list[Planned]:
    """Return a row's requests in order of departure."""
    base = [
        Planned(
            number / rate_rps, Priority.NORMAL if number % _HIGH_OF == number // _HIGH_OF % _HIGH_OF else Priority.HIGH
        )
        for number in range(round(rate_rps * phases.total_s))
    ]
    wave_rps = _SPIKE_FACTOR * rate_rps
    num_wave = round(wave_rps * phases.during_s) if is_spike else 0
    wave = [Planned(phases.before_s + number / wave_rps, Priority.LOW) for number in range(num_wave)]
    return sorted(base + wave, key=lambda request: request.at_s)


def door_of(number: int) -> int:
    """Return which of the doors a request goes through: four in a row over REST (0), then four over gRPC (1)."""
    return number // 4 % len(_DOORS)


def row_of(
    planned: Sequence[Planned],
    load: Load,
    probe: EventProbe,
    back_s: float,
    phases: Phases,
    weights: dict[str, float],
) -> dict[str, Any]:
    """Build a row; `back_s` is the time at which the dependency was back."""
    shots = sorted(load.shots, key=lambda shot: shot.number)
    base = [shot for shot in shots if planned[shot.number].priority is not Priority.LOW]
    usual = degraded_share([shot for shot in base if shot.at_s < phases.before_s])
    answers_s, events_s = answers_recovered_s(base, back_s, usual), probe.recovered_s(back_s)
    recovery_s = None if answers_s is None or events_s is None else round(max(answers_s, events_s), 2)
    by_priority = {
        priority: [shot for shot in shots if planned[shot.number].priority is priority] for priority in Priority
    }
    by_door = {
        name: [shot for shot in by_priority[Priority.HIGH] if door_of(shot.number) == door]
        for door, name in enumerate(_DOORS)
    }
    during = [shot for shot in base if phases.before_s <= shot.at_s < phases.mended_at_s]
    acknowledged = [event for event in probe.events if event.acknowledged_s is not None]
    return {
        **summarise(shots, DEADLINE_MS, weights),
        "answered_at_once": round(sum(map(_is_answered_at_once, base)) / len(base), 5),
        "recovery_s": recovery_s,
        "answers_recovered_s": answers_s,
        "events_recovered_s": events_s and round(events_s, 2),
        "during": summarise(during, DEADLINE_MS, weights),
        "by_priority": {
            priority.name.lower(): summarise(some, DEADLINE_MS, weights)
            for priority, some in by_priority.items()
            if some
        },
        "by_door": {
            f"high over {name}": summarise(some, DEADLINE_MS, weights) for name, some in by_door.items() if some
        },
        "events": {"sent": len(probe.events), "acknowledged": len(acknowledged), "lost": len(probe.unseen())},
        "generator_cpu_share": round(load.cpu_share, 3),
    }


def num_showing(shots: Sequence[Shot], item_ids: Sequence[str]) -> int:
    """Return how many answers hold one of these items."""
    return sum(not set(item_ids).isdisjoint(shot.outcome.item_ids) for shot in shots)


def _is_answered_at_once(shot: Shot) -> bool:
    return shot.outcome.is_ok and shot.outcome.num_attempts == 1
