"""The lifecycle of a supervised part."""

from hypothesis import given
from hypothesis import strategies as st

from infra.local.supervisor.lifecycle import (
    STEADY_S,
    Command,
    Observation,
    PartState,
    Phase,
    RestartPolicy,
    advance,
    backoff_s,
)

POLICY = RestartPolicy(start_timeout_s=30.0, unhealthy_timeout_s=20.0)
MUTE = Observation(alive=True, healthy=False, needs_met=True)
DEAD = Observation(alive=False, healthy=False, needs_met=True)


def state(phase: Phase, since_s: float = 0.0, num_failures: int = 0) -> PartState:
    """Build a state."""
    return PartState(phase=phase, since_s=since_s, num_failures=num_failures)


def test_a_part_waits_for_its_needs() -> None:
    """A part is spawned when its needs are met, and not before."""
    unmet, no_command = advance(PartState(), Observation(alive=False, healthy=False, needs_met=False), 1.0, POLICY)
    met, command = advance(PartState(), DEAD, 1.0, POLICY)

    assert (unmet.phase, no_command) == (Phase.WAITING, None)
    assert (met.phase, command) == (Phase.STARTING, Command.SPAWN)


def test_a_dead_part_backs_off_before_it_is_started_again() -> None:
    """Death counts a failure, and the next start waits for the delay."""
    dead, _ = advance(state(Phase.HEALTHY), DEAD, 10.0, POLICY)
    early, nothing = advance(dead, DEAD, 10.0 + backoff_s(1) / 2, POLICY)
    again, command = advance(early, DEAD, 10.0 + backoff_s(1), POLICY)

    assert (dead.phase, dead.num_failures, nothing) == (Phase.BACKING_OFF, 1, None)
    assert (again.phase, again.num_restarts, command) == (Phase.STARTING, 1, Command.SPAWN)


def test_a_hanging_part_is_killed_after_its_timeout() -> None:
    """A part that stops answering is left alone for a while, then killed."""
    mute, nothing = advance(state(Phase.HEALTHY), MUTE, 5.0, POLICY)
    _, still_nothing = advance(mute, MUTE, 5.0 + POLICY.unhealthy_timeout_s - 0.1, POLICY)
    killed, command = advance(mute, MUTE, 5.0 + POLICY.unhealthy_timeout_s, POLICY)

    assert (mute.phase, nothing, still_nothing) == (Phase.UNHEALTHY, None, None)
    assert (killed.phase, command) == (Phase.BACKING_OFF, Command.KILL)


def test_steady_health_forgives() -> None:
    """Failures count from one again after a steady time."""
    steady, _ = advance(state(Phase.HEALTHY, num_failures=5), DEAD, STEADY_S, POLICY)
    shaky, _ = advance(state(Phase.HEALTHY, num_failures=5), DEAD, STEADY_S - 1, POLICY)

    assert (steady.num_failures, shaky.num_failures) == (1, 6)


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.floats(0.01, 20.0)), max_size=60))
def test_a_part_never_runs_twice_and_never_stays_down(steps: list[tuple[bool, bool, float]]) -> None:
    """Whatever happens, spawns only follow deaths, and a dead part is spawned within the longest delay."""
    part, now_s, alive = PartState(), 0.0, False
    for survives, healthy, passed_s in steps:
        now_s += passed_s
        alive = alive and survives
        part, command = advance(
            part, Observation(alive=alive, healthy=alive and healthy, needs_met=True), now_s, POLICY
        )
        if command is Command.SPAWN:
            assert not alive
            alive = True
        elif command is Command.KILL:
            alive = False
    part, first = advance(part, DEAD, now_s, POLICY)
    _, second = advance(part, DEAD, now_s + 10.1, POLICY)

    assert Command.SPAWN in {first, second}
