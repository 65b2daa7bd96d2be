"""The deadline of a request: absolute on the monotonic clock, from arrival. Pure: time is an argument.

Its last part, the reserve, is kept for formatting and sending the answer.
"""

from dataclasses import dataclass

_MAX_RESERVE_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class DeadlineLimits:
    """The limits of a caller's deadline, and the reserve, in milliseconds."""

    default_ms: int
    min_ms: int
    max_ms: int
    reserve_ms: float


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a request arrived, and for how many seconds it waited before this process began to read it."""

    at_s: float
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Deadline:
    """When the answer must be out. `at_s` and `arrived_s` are seconds of one monotonic clock."""

    arrived_s: float
    at_s: float
    reserve_s: float

    @property
    def total_ms(self) -> int:
        """The deadline as it was granted, in milliseconds from arrival."""
        return round((self.at_s - self.arrived_s) * 1_000)

    def remaining_s(self, now_s: float) -> float:
        """Seconds until the answer must be out; negative once it is late."""
        return self.at_s - now_s

    def budget_s(self, now_s: float) -> float:
        """Seconds that work may still take, the reserve kept back; never negative."""
        return max(0.0, self.at_s - self.reserve_s - now_s)


def deadline_from(arrived_s: float, requested_ms: int | None, limits: DeadlineLimits, late_s: float = 0.0) -> Deadline:
    """Return the deadline: as requested or the default, clamped.

    `late_s` is how late this process runs at times: it is added to the reserve. Each is at most a quarter of the
    deadline.
    """
    wanted_ms = limits.default_ms if requested_ms is None else requested_ms
    granted_s = min(max(wanted_ms, limits.min_ms), limits.max_ms) / 1_000
    most_s = granted_s * _MAX_RESERVE_SHARE
    reserve_s = min(limits.reserve_ms / 1_000, most_s) + min(late_s, most_s)
    return Deadline(arrived_s, arrived_s + granted_s, reserve_s)
