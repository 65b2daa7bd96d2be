"""Decide when a part of the stack is started, healthy, killed and restarted: a pure state machine.

    WAITING --needs met--> STARTING --healthy--> HEALTHY <--healthy/unhealthy--> UNHEALTHY
                              ▲  └──────── died, or past this phase's timeout ────────┘
                              └──── delay over ──── BACKING_OFF ◀────┘

No clock, no processes: time and observations are arguments.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

STEADY_S = 60.0
"""Healthy for this long resets the number of failures."""


class Phase(StrEnum):
    """The phase of one part."""

    WAITING = "waiting"
    STARTING = "starting"
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    BACKING_OFF = "backing off"


class Command(StrEnum):
    """A command to the supervisor."""

    SPAWN = "spawn"
    KILL = "kill"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Time to become healthy after a start, and to become healthy again, before the part is killed."""

    start_timeout_s: float = 30.0
    unhealthy_timeout_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One observation of a part."""

    alive: bool
    healthy: bool
    needs_met: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PartState:
    """One part's phase, its start time, the failures since the part was last steady, and all restarts."""

    phase: Phase = Phase.WAITING
    since_s: float = 0.0
    num_failures: int = 0
    num_restarts: int = 0


def backoff_s(num_failures: int) -> float:
    """Return the delay before the next start: 0.25 s, doubled with each failure, at most 10 s."""
    return min(10.0, 0.25 * 2.0 ** (num_failures - 1))


def advance(
    state: PartState, observed: Observation, now_s: float, restart_policy: RestartPolicy
) -> tuple[PartState, Command | None]:
    """Return the next state, and the command that leads to it."""
    if state.phase is Phase.WAITING:
        return (_enter(state, Phase.STARTING, now_s), Command.SPAWN) if observed.needs_met else (state, None)
    if state.phase is Phase.BACKING_OFF:
        if observed.alive or now_s - state.since_s < backoff_s(state.num_failures):
            return state, None
        started = _enter(state, Phase.STARTING, now_s)
        return replace(started, num_restarts=state.num_restarts + 1), Command.SPAWN
    if not observed.alive:
        return _failed(state, now_s), None
    if observed.healthy:
        return (state, None) if state.phase is Phase.HEALTHY else (_enter(state, Phase.HEALTHY, now_s), None)
    if state.phase is Phase.HEALTHY:
        return _enter(state, Phase.UNHEALTHY, now_s), None
    limit_s = restart_policy.start_timeout_s if state.phase is Phase.STARTING else restart_policy.unhealthy_timeout_s
    return (_failed(state, now_s), Command.KILL) if now_s - state.since_s >= limit_s else (state, None)


def _enter(state: PartState, phase: Phase, now_s: float) -> PartState:
    return replace(state, phase=phase, since_s=now_s)


def _failed(state: PartState, now_s: float) -> PartState:
    was_steady = state.phase is Phase.HEALTHY and now_s - state.since_s >= STEADY_S
    return _enter(replace(state, num_failures=1 if was_steady else state.num_failures + 1), Phase.BACKING_OFF, now_s)
