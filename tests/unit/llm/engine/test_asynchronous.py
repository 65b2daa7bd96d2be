"""An engine that plans the next step while one runs gives what one gives that waits for each step."""

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
from services.llm.engine.outcome import EngineOutcome, Status
from services.llm.engine.schedule.plan import StepSize
from services.llm.engine.text.parameters import SamplingParams
from tests.support.replaying_device import ReplayingDevice
from tests.unit.llm.engine.conftest import build_decoder, build_items

SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=1.5, seed=3),
    SamplingParams(temperature=0.7, top_k=9, num_logprobs=2),
    SamplingParams(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.1),
)
WINDOW = Window(5, frozenset({0, 1}), num_sinks=2)
STOPS = (1, 2, 3, 4, 5, 6, 7, 8)


class InTurn:
    """A mask that lets even and odd tokens come in turn."""

    def __init__(self) -> None:
        self._num_taken = 0

    def allowed(self) -> np.ndarray:
        """Return the bits of one half of the tokens."""
        return np.full(3, 0x55555555 if self._num_taken % 2 else 0xAAAAAAAA, dtype=np.uint32).view(np.int32)

    def take(self, token_id: int) -> None:
        """Note a token."""
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
    """Build an engine over that world, with little room."""
    items, decoder = world(depth, window)
    room = {
        "num_blocks": 60,
        "max_num_batched_tokens": 32,
        "max_chunk_tokens": 12,
        "max_beam_rows": 64,
        "max_running": 5,
    }
    config = EngineConfig(
        block_tokens=4, tile_tokens=64, cpu_kernels="torch", is_asynchronous=is_asynchronous, **room | knobs
    )
    return Engine(decoder, config, items=items, bundle_version="v1", graph_device=device)


def prompt_of(seed: int) -> list[int]:
    """Draw a prompt of 1 to 30 tokens; some share their beginning."""
    rng = np.random.default_rng(seed)
    return [*range(1, 1 + 4 * (seed % 3)), *rng.integers(1, 17, int(rng.integers(1, 22))).tolist()]


class Play:
    """Plays one script to one engine: what ended, what was told of texts, and how large the steps were."""

    def __init__(self, engine: Engine, *, stops: bool, interrupts: bool = True) -> None:
        self.engine = engine
        self.ended: dict[str, EngineOutcome] = {}
        self.told: dict[str, list[int]] = {}
        self.sizes: list[StepSize] = []
        self._stops = STOPS if stops else ()
        self._interrupts = interrupts
        self._now_s = 0.0

    def run(self, script: Sequence[tuple[str, int, int]]) -> "Play":
        """Do what the script says, then let everything end."""
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
        """Step; each outcome comes once, and no block is lost."""
        self._now_s += 1.0
        for outcome in self.engine.step(self._now_s):
            assert outcome.request_id not in self.ended
            self.ended[outcome.request_id] = outcome
        for grown in self.engine.new_tokens:
            self.told.setdefault(grown.request_id, []).append(grown.sampled.token_id)
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
    """Agree in all that a caller sees of an answer; of one that was cut short, in how it began."""
    if found.status in (Status.CANCELLED, Status.LATE):
        assert found.token_ids == wanted.token_ids[: len(found.token_ids)]
        assert not len(found.item_indices)
        return
    assert found.status is wanted.status
    assert found.token_ids == wanted.token_ids
    assert found.item_indices.tolist() == wanted.item_indices.tolist()
    np.testing.assert_allclose(found.scores, wanted.scores, atol=1e-4)


@settings(max_examples=40)
@given(depth=st.integers(1, 4), num_blocks=st.sampled_from([13, 60]), window=windows, script=scripts)
def test_every_answer_is_that_of_an_engine_that_waits(
    depth: int, num_blocks: int, window: Window | None, script: list[tuple[str, int, int]]
) -> None:
    """Texts with stop tokens, masks, choices and all settings, rankings of all depths, put back, cancelled or late between steps."""
    ahead = Play(build_engine(depth, is_asynchronous=True, window=window, num_blocks=num_blocks), stops=True).run(
        script
    )
    waiting = build_engine(depth, is_asynchronous=False, window=window, num_blocks=60)
    wanted = Play(waiting, stops=True, interrupts=False).run(script)

    assert ahead.ended.keys() == wanted.ended.keys()
    for name, outcome in ahead.ended.items():
        assert_same_answer(outcome, wanted.ended[name])
        assert ahead.told.get(name, []) == list(outcome.token_ids)
    assert ahead.engine.load().kv_cache_usage == 0


@settings(max_examples=40)
@given(depth=st.integers(1, 4), num_blocks=st.sampled_from([13, 60]), window=windows, script=scripts)
def test_without_stop_tokens_every_step_is_the_same(
    depth: int, num_blocks: int, window: Window | None, script: list[tuple[str, int, int]]
) -> None:
    """Lengths and levels are known ahead: the steps, the cached tokens, who is put back, cancelled or late are those of an engine that waits."""
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


def test_no_token_is_computed_behind_a_stop() -> None:
    """A text that stopped is taken out of the step that was planned for it: as many tokens are computed as by an engine that waits."""
    plays = [
        Play(build_engine(1, is_asynchronous=ahead, num_blocks=200), stops=True).run([("text", seed, 30)])
        for seed in range(20)
        for ahead in (True, False)
    ]

    stopped = [play for play in plays if play.ended["0"].status is Status.DONE]
    assert len(stopped) > 10
    assert [play.sizes for play in plays[::2]] == [play.sizes for play in plays[1::2]]


@pytest.mark.parametrize("depth", [1, 3])
def test_a_call_starts_a_step_and_tells_of_the_one_before(depth: int) -> None:
    """The first call tells nothing; from then on each tells one step, and the last starts none."""
    engine = build_engine(depth, is_asynchronous=True)
    engine.add_rank("0", [1, 2, 3], k=3, beam_width=5)

    outcomes = [engine.step(0.0) for _ in range(depth)]

    assert outcomes == [[]] * depth
    assert engine.is_ahead
    assert [outcome.status for outcome in engine.step(0.0)] == [Status.DONE]
    assert not engine.is_ahead
    assert not engine.has_work


def test_what_is_spent_can_no_longer_be_cancelled() -> None:
    """A request whose last step runs has left its blocks; its outcome is the one that it earned."""
    engine = build_engine(1, is_asynchronous=True)
    engine.add_text("0", [1, 2, 3], max_new_tokens=1)
    engine.step(0.0)

    is_cancelled = engine.cancel("0")

    assert not is_cancelled
    assert engine.load().kv_cache_usage == 0
    assert [outcome.status for outcome in engine.step(0.0)] == [Status.LENGTH]


@settings(max_examples=15)
@given(depth=st.integers(1, 3), window=windows, script=scripts)
def test_recorded_steps_run_ahead_alike(depth: int, window: Window | None, script: list[tuple[str, int, int]]) -> None:
    """Over recordings whose inputs and outputs are spoiled between replays, the answers are the same."""
    engine = build_engine(depth, is_asynchronous=True, window=window, device=ReplayingDevice(), num_blocks=20)
    engine.warm_up()
    ahead = Play(engine, stops=True).run(script)
    waiting = build_engine(depth, is_asynchronous=False, window=window, num_blocks=20)
    wanted = Play(waiting, stops=True, interrupts=False).run(script)

    for name, outcome in ahead.ended.items():
        assert_same_answer(outcome, wanted.ended[name])
    assert engine.graph_counts.late_captures == engine.graph_counts.eager_fallbacks == 0
