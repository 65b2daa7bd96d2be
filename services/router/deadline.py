"""The one deadline of a request: absolute on the monotonic clock, from arrival. Pure: the time of asking is an argument.

Knows nothing of who spends the time. The last part of it, the reserve, belongs to formatting and sending the answer.
"""

from dataclasses import dataclass

_MAX_RESERVE_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class DeadlineLimits:
    """What a caller may ask for and what is kept back, in milliseconds."""

    default_ms: int
    min_ms: int
    max_ms: int
    reserve_ms: float


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


def deadline_from(arrived_s: float, asked_ms: int | None, limits: DeadlineLimits) -> Deadline:
    """Grant a deadline: what was asked or the default, clamped. The reserve never takes more than a quarter of it."""
    wanted_ms = limits.default_ms if asked_ms is None else asked_ms
    granted_s = min(max(wanted_ms, limits.min_ms), limits.max_ms) / 1_000
    reserve_s = min(limits.reserve_ms / 1_000, granted_s * _MAX_RESERVE_SHARE)
    return Deadline(arrived_s, arrived_s + granted_s, reserve_s)
