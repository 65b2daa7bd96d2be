"""The engine under random use: rankings and texts with shared prompts, masks, cancels and little memory; each answer is that of the request alone."""

from functools import cache

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from models.decoder.window import Window
from services.errors import Overloaded
from services.llm.engine.engine import Engine
from services.llm.engine.outcome import EngineOutcome, Status
from tests.unit.llm.engine.conftest import build_decoder, build_engine, build_items, drain

NUM_ITEMS = 50
WINDOWS = {"full": None, "windowed": Window(6, frozenset({0, 1}), num_sinks=2), "half": Window(9, frozenset({1}))}


@cache
def world(depth: int, window: str):
    """Build a catalogue and a decoder."""
    items = build_items(depth)
    return items, build_decoder(items, window=WINDOWS[window])


def add(engine: Engine, name: str, prompt: tuple[int, ...], work: tuple) -> None:
    """Add a ranking (k, width, excluded items) or a text (number of tokens)."""
    if len(work) == 1:
        engine.add_text(name, prompt, max_new_tokens=work[0])
    else:
        k, width, excluded = work
        engine.add_rank(name, prompt, k=k, beam_width=width, excluded=sorted(excluded))


@cache
def run_alone(depth: int, window: str, prompt: tuple[int, ...], work: tuple) -> EngineOutcome:
    """Return the outcome of an engine without other requests and with an empty cache."""
    items, decoder = world(depth, window)
    engine = build_engine(decoder, items)
    add(engine, "alone", prompt, work)
    return drain(engine)["alone"]


class EngineMachine(RuleBasedStateMachine):
    """One engine with little memory; a request that was not cancelled must have the outcome that it has alone."""

    depth, window, longest = 3, "full", (30, 12)

    def __init__(self) -> None:
        super().__init__()
        items, decoder = world(self.depth, self.window)
        self.engine = build_engine(
            decoder,
            items,
            num_blocks=14,
            max_running=4,
            max_waiting=6,
            max_chunk_tokens=7,
            max_num_batched_tokens=12,
        )
        self.added: dict[str, tuple] = {}
        self.ended: dict[str, EngineOutcome] = {}

    @rule(
        length=st.floats(0, 1),
        start=st.integers(0, 1),
        work=st.tuples(st.floats(0, 1))
        | st.tuples(st.integers(1, 9), st.integers(1, 9), st.frozensets(st.integers(0, NUM_ITEMS - 1), max_size=20)),
    )
    def add(self, length: float, start: int, work: tuple) -> None:
        """Prompts are prefixes of two long ones, so that they share cached blocks. Lengths are fractions of the longest."""
        longest_prompt, longest_text = self.longest
        prompt = tuple((start + 5 * place) % 17 for place in range(1 + round(length * (longest_prompt - 1))))
        work = (1 + round(work[0] * (longest_text - 1)),) if len(work) == 1 else work
        name = str(len(self.added))
        try:
            add(self.engine, name, prompt, work)
        except Overloaded:
            return
        self.added[name] = (prompt, work)

    @rule()
    def step(self) -> None:
        """Each request has one outcome."""
        for outcome in self.engine.step(0.0):
            assert outcome.request_id not in self.ended
            self.ended[outcome.request_id] = outcome

    @precondition(lambda self: self.added)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """A request in flight can be cancelled at any point."""
        self.engine.cancel(data.draw(st.sampled_from(sorted(self.added))))

    @invariant()
    def blocks_are_consistent(self) -> None:
        """No block is lost or shared by mistake."""
        self.engine.check_integrity()

    def teardown(self) -> None:
        """Every request ends, all blocks are free, and every outcome is right."""
        while self.engine.has_work:
            self.step()
        assert self.ended.keys() == self.added.keys()
        assert self.engine.load().kv_cache_usage == 0
        for name, outcome in self.ended.items():
            if outcome.status is not Status.CANCELLED:
                wanted = run_alone(self.depth, self.window, *self.added[name])
                assert outcome.status is wanted.status
                assert outcome.token_ids == wanted.token_ids
                assert outcome.item_indices.tolist() == wanted.item_indices.tolist()
                np.testing.assert_allclose(outcome.scores, wanted.scores, atol=1e-4)


@pytest.mark.parametrize(
    ("depth", "window", "longest"),
    [(3, "full", (30, 12)), (2, "windowed", (50, 30)), (1, "half", (30, 12))],
)
def test_every_outcome_is_that_of_the_request_alone(depth, window, longest) -> None:
    """Whatever else runs, is cached, preempted or cancelled, with sliding windows and without, and longer than the pool."""
    machine = type("Machine", (EngineMachine,), {"depth": depth, "window": window, "longest": longest})
    run_state_machine_as_test(machine, settings=settings(max_examples=8, stateful_step_count=25))


def test_a_cancel_frees_blocks_at_once() -> None:
    """A cancelled request holds no block, and its outcome comes from the next step."""
    items = build_items(1)
    engine = build_engine(build_decoder(items), items, max_chunk_tokens=4)
    engine.add_rank("a", [0] * 20, k=3, allowed=np.ones(50, dtype=bool))
    engine.step(0.0)
    held = engine.load().kv_cache_usage

    cancelled = engine.cancel("a")

    assert held > 0
    assert cancelled
    assert engine.load().kv_cache_usage == 0
    assert [outcome.status for outcome in engine.step(0.0)] == [Status.CANCELLED]
    assert not engine.cancel("a")
