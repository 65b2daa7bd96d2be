"""The lifecycle of a supervised part."""

import pytest
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
UNMET = Observation(alive=False, healthy=False, needs_met=False)
MUTE = Observation(alive=True, healthy=False, needs_met=True)
DEAD = Observation(alive=False, healthy=False, needs_met=True)


def state(phase: Phase, since_s: float = 0.0, num_failures: int = 0) -> PartState:
    return PartState(phase=phase, since_s=since_s, num_failures=num_failures)


def test_the_delay_before_a_start_doubles() -> None:
    """It is 0.25 s after the first failure and at most 10 s."""
    assert [backoff_s(number) for number in range(1, 9)] == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


@pytest.mark.parametrize(
    ("part", "seen", "now_s", "phase", "command", "num_failures"),
    [
        (PartState(), UNMET, 1.0, Phase.WAITING, None, 0),
        (PartState(), DEAD, 1.0, Phase.STARTING, Command.SPAWN, 0),
        (state(Phase.HEALTHY), DEAD, 10.0, Phase.BACKING_OFF, None, 1),
        (state(Phase.BACKING_OFF, 10.0, 1), DEAD, 10.0 + backoff_s(1) / 2, Phase.BACKING_OFF, None, 1),
        (state(Phase.BACKING_OFF, 10.0, 1), DEAD, 10.0 + backoff_s(1), Phase.STARTING, Command.SPAWN, 1),
        (state(Phase.HEALTHY), MUTE, 5.0, Phase.UNHEALTHY, None, 0),
        (state(Phase.UNHEALTHY, 5.0), MUTE, 24.9, Phase.UNHEALTHY, None, 0),
        (state(Phase.UNHEALTHY, 5.0), MUTE, 25.0, Phase.BACKING_OFF, Command.KILL, 1),
        (state(Phase.HEALTHY, num_failures=5), DEAD, STEADY_S, Phase.BACKING_OFF, None, 1),
        (state(Phase.HEALTHY, num_failures=5), DEAD, STEADY_S - 1, Phase.BACKING_OFF, None, 6),
    ],
)
def test_a_part_moves_on_by_what_is_seen(
    part: PartState, seen: Observation, now_s: float, phase: Phase, command: Command | None, num_failures: int
) -> None:
    """A part waits for its needs, backs off after a crash, and is killed if mute; steady health resets failures."""
    after, given_command = advance(part, seen, now_s, POLICY)

    assert (after.phase, given_command, after.num_failures) == (phase, command, num_failures)
    assert after.num_restarts == (phase is Phase.STARTING and num_failures > 0)


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.floats(0.01, 20.0)), max_size=60))
def test_a_part_never_runs_twice_and_never_stays_down(steps: list[tuple[bool, bool, float]]) -> None:
    """A part is spawned only after it has died, and a dead part is spawned within the longest delay."""
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
