"""Whatever else runs in an engine, each request has the outcome that it has alone: synchronous or ahead, with graphs and without."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from models.decoder.window import Window
from tests.support.engine.engine_scripts import Action, Play, World, assert_as_alone, scripts
from tests.support.engine.replaying_device import ReplayingDevice

SINKS = Window(5, frozenset({0, 1}), num_sinks=2)
WORLDS = (
    World(1, stops=False),
    World(2, SINKS, longest=4),
    World(2, SINKS, longest=4, stops=False),
    World(3),
    World(4, Window(9, frozenset({1}))),
)
"""Where all layers have a window, texts are longer than the pool."""
GRID = pytest.mark.grid


@pytest.mark.parametrize(
    ("is_asynchronous", "num_examples"), [(False, 12), (True, 12), pytest.param(True, 100, marks=GRID)]
)
def test_every_outcome_is_that_of_the_request_alone(is_asynchronous: bool, num_examples: int) -> None:
    """Texts with stop tokens, masks, choices and all settings, rankings of all depths, preempted, cancelled or late between steps."""

    @settings(max_examples=num_examples)
    @example(world=WORLDS[2], num_blocks=13, script=[("text", 2, 12), ("text", 0, 12), ("step", 4, 0), ("rank", 2, 9)])
    @given(world=st.sampled_from(WORLDS), num_blocks=st.sampled_from([13, 60]), script=scripts)
    def compare(world: World, num_blocks: int, script: list[Action]) -> None:
        engine = world.engine(is_asynchronous=is_asynchronous, num_blocks=num_blocks)
        assert_as_alone(Play(world, engine).run(script))

    compare()


@pytest.mark.parametrize(
    ("world", "is_asynchronous", "num_examples"),
    [
        (World(1, stops=False), False, 6),
        (World(3, SINKS, longest=4), True, 4),
        pytest.param(World(2, stops=False), True, 40, marks=GRID),
        pytest.param(World(3), False, 40, marks=GRID),
    ],
)
def test_recorded_steps_have_the_same_outcomes(world: World, is_asynchronous: bool, num_examples: int) -> None:
    """Also when the inputs and outputs of the recordings are overwritten between replays; no step is recorded late or runs without one."""
    engine = world.engine(ReplayingDevice(), is_asynchronous=is_asynchronous, num_blocks=20)

    @settings(max_examples=num_examples)
    @given(script=scripts)
    def compare(script: list[Action]) -> None:
        assert_as_alone(Play(world, engine).run(script))

    compare()
    assert engine.graph_counts.late_captures == engine.graph_counts.eager_fallbacks == 0


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_preempted_text_continues_where_it_was(is_recorded: bool) -> None:
    """Where blocks run out a text is computed again, and has the tokens that it has alone."""
    world = World(1, stops=False)
    play = Play(world, world.engine(ReplayingDevice() if is_recorded else None, num_blocks=20))

    play.run([("text", seed, 12) for seed in range(5)])

    assert sum(outcome.num_preemptions for outcome in play.ended.values()) > 0
    assert_as_alone(play)
