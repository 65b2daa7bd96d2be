"""The lifecycle of a supervised part: `pytest tests/unit/infra/test_lifecycle.py`."""

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

PATIENCE = RestartPolicy(start_timeout_s=30.0, unhealthy_timeout_s=20.0)
WELL = Observation(alive=True, healthy=True, needs_met=True)
MUTE = Observation(alive=True, healthy=False, needs_met=True)
DEAD = Observation(alive=False, healthy=False, needs_met=True)


def state(phase: Phase, since_s: float = 0.0, num_failures: int = 0) -> PartState:
    """Build a state."""
    return PartState(phase=phase, since_s=since_s, num_failures=num_failures)


def test_a_part_waits_for_its_needs() -> None:
    """A part is spawned when its needs are met, and not before."""
    unmet, no_command = advance(PartState(), Observation(alive=False, healthy=False, needs_met=False), 1.0, PATIENCE)
    met, command = advance(PartState(), DEAD, 1.0, PATIENCE)

    assert (unmet.phase, no_command) == (Phase.WAITING, None)
    assert (met.phase, command) == (Phase.STARTING, Command.SPAWN)


def test_a_part_that_answers_is_healthy() -> None:
    """The first answer makes a starting part healthy."""
    after, command = advance(state(Phase.STARTING), WELL, 1.0, PATIENCE)

    assert (after.phase, command) == (Phase.HEALTHY, None)


def test_a_dead_part_backs_off_before_it_is_started_again() -> None:
    """Death counts a failure, and the next start waits for the delay."""
    dead, _ = advance(state(Phase.HEALTHY), DEAD, 10.0, PATIENCE)
    early, nothing = advance(dead, DEAD, 10.0 + backoff_s(1) / 2, PATIENCE)
    again, command = advance(early, DEAD, 10.0 + backoff_s(1), PATIENCE)

    assert (dead.phase, dead.num_failures, nothing) == (Phase.BACKING_OFF, 1, None)
    assert (again.phase, again.num_restarts, command) == (Phase.STARTING, 1, Command.SPAWN)


def test_a_part_being_killed_is_not_started_beside_itself() -> None:
    """While the old process lives, however long its delay is over, no second one is spawned."""
    after, command = advance(state(Phase.BACKING_OFF, num_failures=1), MUTE, 100.0, PATIENCE)

    assert (after.phase, command) == (Phase.BACKING_OFF, None)


def test_a_hanging_part_is_killed_after_its_patience() -> None:
    """A part that stops answering is left alone for a while, then killed."""
    mute, nothing = advance(state(Phase.HEALTHY), MUTE, 5.0, PATIENCE)
    _, still_nothing = advance(mute, MUTE, 5.0 + PATIENCE.unhealthy_timeout_s - 0.1, PATIENCE)
    killed, command = advance(mute, MUTE, 5.0 + PATIENCE.unhealthy_timeout_s, PATIENCE)

    assert (mute.phase, nothing, still_nothing) == (Phase.UNHEALTHY, None, None)
    assert (killed.phase, command) == (Phase.BACKING_OFF, Command.KILL)


def test_a_part_that_answers_again_is_not_restarted() -> None:
    """A pause shorter than the restart_policy costs nothing."""
    after, command = advance(state(Phase.UNHEALTHY, since_s=1.0), WELL, 2.0, PATIENCE)

    assert (after.phase, after.num_restarts, command) == (Phase.HEALTHY, 0, None)


def test_steady_health_forgives() -> None:
    """Failures count from one again after a steady time."""
    steady, _ = advance(state(Phase.HEALTHY, num_failures=5), DEAD, STEADY_S, PATIENCE)
    shaky, _ = advance(state(Phase.HEALTHY, num_failures=5), DEAD, STEADY_S - 1, PATIENCE)

    assert (steady.num_failures, shaky.num_failures) == (1, 6)


def test_the_delay_doubles_up_to_ten_seconds() -> None:
    """The back-off grows with each failure and is bounded."""
    assert [backoff_s(number) for number in (1, 2, 3, 20)] == [0.25, 0.5, 1.0, 10.0]


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.floats(0.01, 20.0)), max_size=60))
def test_a_part_never_runs_twice_and_never_stays_down(steps: list[tuple[bool, bool, float]]) -> None:
    """Whatever happens, spawns only follow deaths, and a dead part is spawned within the longest delay."""
    part, now_s, alive = PartState(), 0.0, False
    for survives, healthy, passed_s in steps:
        now_s += passed_s
        alive = alive and survives
        part, command = advance(
            part, Observation(alive=alive, healthy=alive and healthy, needs_met=True), now_s, PATIENCE
        )
        if command is Command.SPAWN:
            assert not alive
            alive = True
        elif command is Command.KILL:
            alive = False
    part, first = advance(part, DEAD, now_s, PATIENCE)
    _, second = advance(part, DEAD, now_s + 10.1, PATIENCE)

    assert Command.SPAWN in {first, second}
