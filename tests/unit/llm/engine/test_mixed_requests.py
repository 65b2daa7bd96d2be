"""In any mix, each request has the outcome that it has in isolation: synchronous or not, with or without graphs."""

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
"""If all layers have a window, texts are longer than the pool."""
GRID = pytest.mark.grid


@pytest.mark.parametrize(
    ("is_asynchronous", "num_examples"), [(False, 12), (True, 12), pytest.param(True, 100, marks=GRID)]
)
def test_every_outcome_is_that_of_the_request_alone(is_asynchronous: bool, num_examples: int) -> None:
    """Texts and rankings with all settings, preempted, cancelled or late, have the outcomes of isolated requests."""

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
    """Outcomes are equal although recordings' buffers are overwritten between replays, without late captures."""
    engine = world.engine(ReplayingDevice(), is_asynchronous=is_asynchronous, num_blocks=20)

    @settings(max_examples=num_examples)
    @given(script=scripts)
    def compare(script: list[Action]) -> None:
        assert_as_alone(Play(world, engine).run(script))

    compare()
    assert engine.graph_counts.late_captures == engine.graph_counts.eager_fallbacks == 0


@pytest.mark.parametrize(
    ("world", "is_recorded", "is_asynchronous", "num_examples"),
    [
        (WORLDS[0], False, False, 12),
        (WORLDS[2], True, True, 6),
        pytest.param(WORLDS[2], False, True, 60, marks=GRID),
        pytest.param(WORLDS[0], True, False, 60, marks=GRID),
    ],
)
def test_drafts_change_no_outcome(world: World, is_recorded: bool, is_asynchronous: bool, num_examples: int) -> None:
    """With speculation, greedy, sampled, masked and preempted texts have the outcomes of plain decoding."""
    device = ReplayingDevice() if is_recorded else None
    num_drafted = 0

    @settings(max_examples=num_examples)
    @example(num_blocks=13, script=[("text", seed, 12) for seed in range(8)])
    @example(num_blocks=60, script=[("choices", 4, 12), ("masked", 3, 12), ("masked", 4, 12), ("text", 4, 12)])
    @given(num_blocks=st.sampled_from([13, 60]), script=scripts)
    def compare(num_blocks: int, script: list[Action]) -> None:
        nonlocal num_drafted
        engine = world.engine(device, is_asynchronous=is_asynchronous, num_blocks=num_blocks, num_speculative_tokens=3)
        assert_as_alone(Play(world, engine).run(script))
        num_drafted += engine.draft_counts.num_drafted

    compare()
    assert num_drafted > 0


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_preempted_text_continues_where_it_was(is_recorded: bool) -> None:
    """A preempted text is recomputed and gets the tokens that it gets in isolation."""
    world = World(1, stops=False)
    play = Play(world, world.engine(ReplayingDevice() if is_recorded else None, num_blocks=20))

    play.run([("text", seed, 12) for seed in range(5)])

    assert sum(outcome.num_preemptions for outcome in play.ended.values()) > 0
    assert_as_alone(play)
