"""An asynchronous engine plans the next step while a step runs: start and read order, and wasted computation."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.decoder.window import Window
from services.llm.engine.outcome import SequenceStatus
from services.llm.engine.runner import RunningStep
from services.llm.engine.sampling_parameters import SamplingParams
from tests.support.engine.engine_scripts import (
    STOPS,
    Action,
    EvenAndOdd,
    Play,
    World,
    assert_same_answer,
    prompt_of,
    scripts,
)
from tests.support.engine.engines import drain
from tests.support.engine.replaying_device import ReplayingDevice

windows = st.sampled_from([None, Window(5, frozenset({0, 1}), num_sinks=2)])
worlds = st.builds(World, st.integers(1, 4), windows, stops=st.just(False))


@settings(max_examples=12)
@given(world=worlds, num_blocks=st.sampled_from([13, 60]), script=scripts)
def test_without_stop_tokens_every_step_is_that_of_a_synchronous_engine(
    world: World, num_blocks: int, script: list[Action]
) -> None:
    """With lengths and levels known ahead, steps, cached tokens, preemptions, cancels and timeouts are equal."""
    ahead, wanted = (
        Play(world, world.engine(is_asynchronous=ahead, num_blocks=num_blocks)).run(script) for ahead in (True, False)
    )

    assert ahead.sizes == wanted.sizes
    for name, outcome in wanted.ended.items():
        result = ahead.ended[name]
        assert_same_answer(result, outcome)
        assert result.status is outcome.status
        assert len(outcome.token_ids) - len(result.token_ids) in (0, 1)
        facts = [(run.num_cached_tokens, run.num_steps, run.num_preemptions) for run in (result, outcome)]
        assert facts[0] == facts[1]


def test_no_token_is_computed_after_a_stop() -> None:
    """A stopped text is removed from its planned step, so no more tokens are computed than by a synchronous engine."""
    plays = [
        Play(World(1), World(1).engine(is_asynchronous=ahead, num_blocks=200)).run([("text", seed, 30)])
        for seed in range(12)
        for ahead in (True, False)
    ]

    stopped = [play for play in plays if play.ended["0"].status is SequenceStatus.DONE]
    assert len(stopped) > 5
    assert [play.sizes for play in plays[::2]] == [play.sizes for play in plays[1::2]]


@pytest.mark.parametrize(
    ("sampling", "mask", "is_fed"),
    [
        (SamplingParams(), None, True),
        (SamplingParams(temperature=0.8, top_p=0.9, seed=3, num_logprobs=2), None, True),
        (SamplingParams(presence_penalty=1.0), None, False),
        (SamplingParams(), EvenAndOdd(), False),
    ],
)
def test_the_next_token_waits_for_the_host_only_where_the_host_is_needed(
    sampling: SamplingParams, mask: EvenAndOdd | None, is_fed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorded text step starts before the previous token is read, unless a mask or a penalty needs that token."""
    engine, calls = World(1).engine(ReplayingDevice(), is_asynchronous=True), list[str]()
    submit, collect = engine._runner.submit, RunningStep.collect
    monkeypatch.setattr(engine._runner, "submit", lambda plan: (calls.append("start"), submit(plan))[1])
    monkeypatch.setattr(RunningStep, "collect", lambda step: (calls.append("read"), collect(step))[1])
    engine.add_text("0", [1, 2, 3], max_new_tokens=4, sampling=sampling, mask=mask)

    while engine.has_work:
        engine.step(0.0)

    pair = ["start", "read"] if is_fed else ["read", "start"]
    assert calls == ["start", *pair * 3, "read"]


def test_a_text_that_stops_while_the_next_step_runs_ends_with_its_stop_token() -> None:
    """Tokens computed after the stop token are dropped, the blocks freed, and the cached prefix is unchanged."""
    outcomes = []
    for ahead in (True, False):
        engine = World(1).engine(ReplayingDevice() if ahead else None, is_asynchronous=ahead, num_blocks=200)
        for turn in range(24):
            engine.add_text(f"{turn}", prompt_of(turn // 2), max_new_tokens=30, stop_token_ids=STOPS)
            if turn % 4 == 3:
                outcomes += [(ahead, ended) for ended in drain(engine).values()]
        assert engine.load().kv_cache_usage == 0

    fed, plain = ([outcome for flag, outcome in outcomes if flag is ahead] for ahead in (True, False))
    assert sum(outcome.status is SequenceStatus.DONE for outcome in fed) > 10
    facts = [
        {outcome.request_id: (outcome.status, outcome.token_ids, outcome.num_cached_tokens) for outcome in outcomes}
        for outcomes in (fed, plain)
    ]
    assert facts[0] == facts[1]


@pytest.mark.parametrize("depth", [1, 3])
def test_a_call_starts_a_step_and_returns_the_results_of_the_one_before(depth: int) -> None:
    """The first call returns no results, and the last call starts no step."""
    engine = World(depth).engine(is_asynchronous=True)
    engine.add_rank("0", [1, 2, 3], k=3, beam_width=5)

    outcomes = [engine.step(0.0) for _ in range(depth)]

    assert outcomes == [[]] * depth
    assert engine.is_ahead
    assert [outcome.status for outcome in engine.step(0.0)] == [SequenceStatus.DONE]
    assert not engine.is_ahead
    assert not engine.has_work


def test_a_request_in_its_last_step_cannot_be_cancelled() -> None:
    """A request in its last step has already freed its blocks and returns the step's outcome."""
    engine = World(1).engine(is_asynchronous=True)
    engine.add_text("0", [1, 2, 3], max_new_tokens=1)
    engine.step(0.0)

    is_cancelled = engine.cancel("0")

    assert not is_cancelled
    assert engine.load().kv_cache_usage == 0
    assert [outcome.status for outcome in engine.step(0.0)] == [SequenceStatus.LENGTH]
