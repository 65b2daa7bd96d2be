"""An asynchronous engine, which plans the next step while one runs, has the outcomes of a synchronous one."""

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.decoder.decoder import Decoder
from models.decoder.window import Window
from services.llm.engine.beam.trie import ItemCodes
from services.llm.engine.config import EngineConfig
from services.llm.engine.engine import Engine
from services.llm.engine.forward.runner import RunningStep
from services.llm.engine.outcome import EngineOutcome, Status
from services.llm.engine.schedule.plan import StepSize
from services.llm.engine.text.parameters import SamplingParams
from tests.support.replaying_device import ReplayingDevice
from tests.unit.llm.engine.conftest import build_decoder, build_items, drain

SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=1.5, seed=3),
    SamplingParams(temperature=0.7, top_k=9, num_logprobs=2),
    SamplingParams(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.1),
)
WINDOW = Window(5, frozenset({0, 1}), num_sinks=2)
Script = list[tuple[str, int, int]]
STOPS = (1, 2, 3, 4, 5, 6, 7, 8)


class InTurn:
    """A mask that allows even and odd tokens in turn."""

    def __init__(self) -> None:
        self._num_taken = 0

    def allowed(self) -> np.ndarray:
        """Return the bits of one half of the tokens."""
        return np.full(3, 0x55555555 if self._num_taken % 2 else 0xAAAAAAAA, dtype=np.uint32).view(np.int32)

    def take(self, token_id: int) -> None:
        """Check and count a token."""
        assert token_id % 2 != self._num_taken % 2
        self._num_taken += 1


@cache
def world(depth: int, window: Window | None = None) -> tuple[ItemCodes, Decoder]:
    """Build a catalogue and a decoder."""
    items = build_items(depth)
    return items, build_decoder(items, window=window)


def build_engine(
    depth: int,
    *,
    is_asynchronous: bool,
    window: Window | None = None,
    device: ReplayingDevice | None = None,
    **knobs: int,
) -> Engine:
    """Build an engine over that world, with little memory."""
    items, decoder = world(depth, window)
    limits = {
        "num_blocks": 60,
        "max_num_batched_tokens": 32,
        "max_chunk_tokens": 12,
        "max_beam_rows": 64,
        "max_running": 5,
    }
    config = EngineConfig(
        block_tokens=4, tile_tokens=64, cpu_kernels="torch", is_asynchronous=is_asynchronous, **limits | knobs
    )
    return Engine(decoder, config, items=items, bundle_version="v1", graph_device=device)


def prompt_of(seed: int) -> list[int]:
    """Draw a prompt of 1 to 30 tokens; some share their beginning."""
    rng = np.random.default_rng(seed)
    return [*range(1, 1 + 4 * (seed % 3)), *rng.integers(1, 17, int(rng.integers(1, 22))).tolist()]


class Play:
    """Runs one script on one engine and records the outcomes, the tokens of texts, and the sizes of the steps."""

    def __init__(self, engine: Engine, *, stops: bool, interrupts: bool = True) -> None:
        self.engine = engine
        self.ended: dict[str, EngineOutcome] = {}
        self.tokens: dict[str, list[int]] = {}
        self.sizes: list[StepSize] = []
        self._stops = STOPS if stops else ()
        self._interrupts = interrupts
        self._now_s = 0.0

    def run(self, script: Sequence[tuple[str, int, int]]) -> "Play":
        """Run the script, then step until every request has ended."""
        for turn, (kind, number, size) in enumerate(script):
            if kind == "step":
                for _ in range(number):
                    self.step()
            elif kind == "cancel":
                if self._interrupts:
                    self.engine.cancel(f"{number}")
            else:
                self._add(f"{turn}", kind, number, size)
        while self.engine.has_work:
            self.step()
        return self

    def step(self) -> None:
        """Step; each request has one outcome, and no block is lost."""
        self._now_s += 1.0
        for outcome in self.engine.step(self._now_s):
            assert outcome.request_id not in self.ended
            self.ended[outcome.request_id] = outcome
        for grown in self.engine.new_tokens:
            self.tokens.setdefault(grown.request_id, []).append(grown.sampled.token_id)
        if self.engine.last_step.num_requests:
            self.sizes.append(self.engine.last_step)
        self.engine.check_integrity()

    def _add(self, name: str, kind: str, number: int, size: int) -> None:
        deadline_s = self._now_s + size if kind.startswith("late") and self._interrupts else None
        if kind.endswith("rank"):
            excluded = np.arange(number % 20)
            self.engine.add_rank(
                name,
                prompt_of(number),
                k=min(size, 9),
                excluded=excluded,
                beam_width=size,
                now_s=self._now_s,
                deadline_s=deadline_s,
            )
            return
        for choice in range(2 if kind == "choices" else 1):
            self.engine.add_text(
                f"{name}.{choice}" if choice else name,
                prompt_of(number),
                max_new_tokens=size,
                sampling=SAMPLINGS[(number + choice) % len(SAMPLINGS)],
                stop_token_ids=self._stops,
                mask=InTurn() if kind == "held" else None,
                after=name if choice else None,
                now_s=self._now_s,
                deadline_s=deadline_s,
            )


actions = st.one_of(
    st.tuples(st.sampled_from(["rank", "late rank"]), st.integers(0, 30), st.integers(1, 30)),
    st.tuples(st.sampled_from(["text", "held", "choices", "late text"]), st.integers(0, 30), st.integers(1, 12)),
    st.tuples(st.just("cancel"), st.integers(0, 12), st.just(0)),
    st.tuples(st.just("step"), st.integers(1, 4), st.just(0)),
)
scripts = st.lists(actions, max_size=14)
windows = st.sampled_from([None, WINDOW])


def assert_same_answer(found: EngineOutcome, wanted: EngineOutcome) -> None:
    """Compare all that a caller sees of an outcome; of one that was cut short, its beginning."""
    if found.status in (Status.CANCELLED, Status.LATE):
        assert found.token_ids == wanted.token_ids[: len(found.token_ids)]
        assert not len(found.item_indices)
        return
    assert found.status is wanted.status
    assert found.token_ids == wanted.token_ids
    assert found.item_indices.tolist() == wanted.item_indices.tolist()
    np.testing.assert_allclose(found.scores, wanted.scores, atol=1e-4)


def assert_same_outcomes(engine: Engine, depth: int, window: Window | None, script: Script) -> None:
    """Run the script here and on a synchronous engine with more memory and without interrupts."""
    ahead = Play(engine, stops=True).run(script)
    synchronous = build_engine(depth, is_asynchronous=False, window=window)
    wanted = Play(synchronous, stops=True, interrupts=False).run(script)

    assert ahead.ended.keys() == wanted.ended.keys()
    for name, outcome in ahead.ended.items():
        assert_same_answer(outcome, wanted.ended[name])
        assert ahead.tokens.get(name, []) == list(outcome.token_ids)
    assert engine.load().kv_cache_usage == 0


@pytest.mark.parametrize("num_examples", [12, pytest.param(100, marks=pytest.mark.grid)])
def test_every_outcome_is_that_of_a_synchronous_engine(num_examples: int) -> None:
    """Texts with stop tokens, masks, choices and all settings, rankings of all depths, preempted, cancelled or late between steps."""

    @settings(max_examples=num_examples)
    @given(depth=st.integers(1, 4), num_blocks=st.sampled_from([13, 60]), window=windows, script=scripts)
    def compare(depth: int, num_blocks: int, window: Window | None, script: Script) -> None:
        engine = build_engine(depth, is_asynchronous=True, window=window, num_blocks=num_blocks)
        assert_same_outcomes(engine, depth, window, script)

    compare()


@pytest.mark.parametrize(
    ("depth", "window", "num_examples"), [(3, WINDOW, 4), pytest.param(2, None, 30, marks=pytest.mark.grid)]
)
def test_recorded_steps_have_the_same_outcomes(depth: int, window: Window | None, num_examples: int) -> None:
    """Also when the inputs and outputs of the recordings are overwritten between replays."""
    engine = build_engine(depth, is_asynchronous=True, window=window, device=ReplayingDevice(), num_blocks=20)
    engine.warm_up()

    @settings(max_examples=num_examples)
    @given(script=scripts)
    def compare(script: Script) -> None:
        assert_same_outcomes(engine, depth, window, script)

    compare()
    assert engine.graph_counts.late_captures == engine.graph_counts.eager_fallbacks == 0


@settings(max_examples=12)
@given(depth=st.integers(1, 4), num_blocks=st.sampled_from([13, 60]), window=windows, script=scripts)
def test_without_stop_tokens_every_step_is_that_of_a_synchronous_engine(
    depth: int, num_blocks: int, window: Window | None, script: Script
) -> None:
    """Lengths and levels are known ahead: steps, cached tokens, preemptions, cancelled and late requests are the same."""
    ahead, wanted = (
        Play(build_engine(depth, is_asynchronous=ahead, window=window, num_blocks=num_blocks), stops=False).run(script)
        for ahead in (True, False)
    )

    assert ahead.sizes == wanted.sizes
    for name, outcome in wanted.ended.items():
        found = ahead.ended[name]
        assert_same_answer(found, outcome)
        assert found.status is outcome.status
        assert len(outcome.token_ids) - len(found.token_ids) in (0, 1)
        facts = [(one.num_cached_tokens, one.num_steps, one.num_preemptions) for one in (found, outcome)]
        assert facts[0] == facts[1]


def test_no_token_is_computed_after_a_stop() -> None:
    """A stopped text is removed from the step that was planned for it: no more tokens are computed than by a synchronous engine."""
    plays = [
        Play(build_engine(1, is_asynchronous=ahead, num_blocks=200), stops=True).run([("text", seed, 30)])
        for seed in range(12)
        for ahead in (True, False)
    ]

    stopped = [play for play in plays if play.ended["0"].status is Status.DONE]
    assert len(stopped) > 5
    assert [play.sizes for play in plays[::2]] == [play.sizes for play in plays[1::2]]


@pytest.mark.parametrize(
    ("sampling", "mask", "is_fed"),
    [
        (SamplingParams(), None, True),
        (SamplingParams(temperature=0.8, top_p=0.9, seed=3, num_logprobs=2), None, True),
        (SamplingParams(presence_penalty=1.0), None, False),
        (SamplingParams(), InTurn(), False),
    ],
)
def test_the_next_token_waits_for_the_host_only_where_the_host_is_needed(
    sampling: SamplingParams, mask: InTurn | None, is_fed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of recorded text starts before the token of the step before is read, unless a mask or a penalty needs that token."""
    engine, calls = build_engine(1, is_asynchronous=True, device=ReplayingDevice()), list[str]()
    engine.warm_up()
    submit, collect = engine._runner.submit, RunningStep.collect
    monkeypatch.setattr(engine._runner, "submit", lambda plan: (calls.append("start"), submit(plan))[1])
    monkeypatch.setattr(RunningStep, "collect", lambda step: (calls.append("read"), collect(step))[1])
    engine.add_text("0", [1, 2, 3], max_new_tokens=4, sampling=sampling, mask=mask)

    while engine.has_work:
        engine.step(0.0)

    pair = ["start", "read"] if is_fed else ["read", "start"]
    assert calls == ["start", *pair * 3, "read"]


def test_a_text_that_stops_while_the_next_step_runs_ends_with_its_stop_token() -> None:
    """What the running step computes after the stop token is dropped, its block is freed, and the cached prefix is what a synchronous engine caches."""
    outcomes = []
    for ahead in (True, False):
        engine = build_engine(1, is_asynchronous=ahead, device=ReplayingDevice() if ahead else None, num_blocks=200)
        engine.warm_up()
        for turn in range(24):
            engine.add_text(f"{turn}", prompt_of(turn // 2), max_new_tokens=30, stop_token_ids=STOPS)
            if turn % 4 == 3:
                outcomes += [(ahead, ended) for ended in drain(engine).values()]
        assert engine.load().kv_cache_usage == 0

    fed, plain = ([outcome for flag, outcome in outcomes if flag is ahead] for ahead in (True, False))
    assert sum(outcome.status is Status.DONE for outcome in fed) > 10
    facts = [
        {one.request_id: (one.status, one.token_ids, one.num_cached_tokens) for one in found} for found in (fed, plain)
    ]
    assert facts[0] == facts[1]


@pytest.mark.parametrize("depth", [1, 3])
def test_a_call_starts_a_step_and_returns_the_results_of_the_one_before(depth: int) -> None:
    """The first call returns no results, and the last starts no step."""
    engine = build_engine(depth, is_asynchronous=True)
    engine.add_rank("0", [1, 2, 3], k=3, beam_width=5)

    outcomes = [engine.step(0.0) for _ in range(depth)]

    assert outcomes == [[]] * depth
    assert engine.is_ahead
    assert [outcome.status for outcome in engine.step(0.0)] == [Status.DONE]
    assert not engine.is_ahead
    assert not engine.has_work


def test_a_request_in_its_last_step_cannot_be_cancelled() -> None:
    """Its blocks are free already, and its outcome is that of the step."""
    engine = build_engine(1, is_asynchronous=True)
    engine.add_text("0", [1, 2, 3], max_new_tokens=1)
    engine.step(0.0)

    is_cancelled = engine.cancel("0")

    assert not is_cancelled
    assert engine.load().kv_cache_usage == 0
    assert [outcome.status for outcome in engine.step(0.0)] == [Status.LENGTH]
