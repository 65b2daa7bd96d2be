"""Requests of many adapters and of the base in one batch, against engines whose weights have the adapter merged in."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from models.decoder.adapter import Adapter
from models.decoder.decoder import Decoder
from services.errors import ConfigError, InvalidRequest, Overloaded
from services.llm.engine.adapters import AdapterPool
from services.llm.engine.beam.trie import ItemCodes
from services.llm.engine.config import EngineConfig
from services.llm.engine.engine import Engine
from services.llm.engine.outcome import SequenceStatus
from tests.support.engine.adapters import build_adapter, merged
from tests.support.engine.engines import build_decoder, build_engine, build_items, drain

RANKS = (1, 2, 3, 4, 8, 12, 16, 5)
KERNELS = pytest.mark.parametrize("kernels", ["torch", pytest.param("compiled", marks=pytest.mark.native)])


def build_adapters(decoder: Decoder):
    """Build eight adapters of mixed rank; two change only some projections."""
    targets = [(), ("q", "v"), (), ("down",), (), (), (), ()]
    return {
        f"adapter {rank}": build_adapter(decoder, rank, rank, names) for rank, names in zip(RANKS, targets, strict=True)
    }


def prompt_of(items: ItemCodes, length: int, seed: int) -> list[int]:
    """Build a prompt of tokens of the catalogue."""
    rng = np.random.default_rng(seed)
    return [0, *rng.integers(1, 1 + sum(items.level_sizes), length).tolist()]


def rank_alone(decoder: Decoder, items: ItemCodes, prompt: list[int], **knobs):
    """Rank one prompt in an engine of its own."""
    engine = build_engine(decoder, items, **knobs)
    engine.add_rank("one", prompt, k=8, beam_width=8)
    return drain(engine)["one"]


@KERNELS
@pytest.mark.parametrize("depth", [1, 3])
def test_eight_adapters_of_mixed_rank_in_one_batch_equal_merged_weights(depth, kernels) -> None:
    """Each request of a batch gets the items and scores of its own merged weights, the base's requests the base's."""
    items = build_items(depth)
    decoder = build_decoder(items)
    adapters = build_adapters(decoder)
    prompts = {key: prompt_of(items, 5 + 7 * number, number) for number, key in enumerate(("", *adapters))}
    expected = {
        key: rank_alone(merged(decoder, adapters.get(key)), items, prompt, cpu_kernels=kernels)
        for key, prompt in prompts.items()
    }
    engine = build_engine(decoder, items, cpu_kernels=kernels)
    for key, adapter in adapters.items():
        engine.load_adapter(key, adapter)

    for key, prompt in prompts.items():
        engine.add_rank(key, prompt, k=8, beam_width=8, adapter=key)
    outcomes = drain(engine)

    for key, outcome in expected.items():
        assert outcomes[key].item_indices.tolist() == outcome.item_indices.tolist(), key
        np.testing.assert_allclose(outcomes[key].scores, outcome.scores, atol=1e-5, err_msg=key)
    assert not np.allclose(outcomes[""].scores, outcomes["adapter 16"].scores, atol=1e-2)


@KERNELS
def test_texts_of_adapters_equal_merged_weights(kernels) -> None:
    """Greedy texts of two adapters and the base in one batch equal the results of merged weights."""
    decoder = build_decoder(build_items(1))
    adapters = dict(itertools.islice(build_adapters(decoder).items(), 4, 6))
    prompt = prompt_of(build_items(1), 20, 1)
    engine = build_engine(decoder, None, cpu_kernels=kernels)
    for key, adapter in adapters.items():
        engine.load_adapter(key, adapter)
    for key in ("", *adapters):
        engine.add_text(key, prompt, max_new_tokens=12, adapter=key)
    outcomes = drain(engine)

    for key in ("", *adapters):
        alone = build_engine(merged(decoder, adapters.get(key)), None, cpu_kernels=kernels)
        alone.add_text("one", prompt, max_new_tokens=12)
        assert outcomes[key].token_ids == drain(alone)["one"].token_ids


@pytest.mark.native
def test_an_adapter_changes_quantised_weights_alike() -> None:
    """Compiled steps with base weights in 8 bits add the adapter in full precision."""
    items = build_items(1)
    decoder = build_decoder(items)
    adapter = build_adapter(decoder, 4, 1)
    base = rank_alone(decoder, items, prompt_of(items, 20, 1), cpu_kernels="compiled", weight_kind="int8")
    exact = rank_alone(merged(decoder, adapter), items, prompt_of(items, 20, 1))
    engine = build_engine(decoder, items, cpu_kernels="compiled", weight_kind="int8")
    engine.load_adapter("a", adapter)
    engine.add_rank("one", prompt_of(items, 20, 1), k=60, adapter="a")
    outcome = drain(engine)["one"]

    scores = dict(zip(outcome.item_indices.tolist(), outcome.scores.tolist(), strict=True))
    errors = [abs(scores[item] - score) for item, score in zip(exact.item_indices.tolist(), exact.scores, strict=True)]
    assert max(errors) < 0.1
    assert not np.allclose(base.scores, exact.scores, atol=0.1)


def test_cached_prefixes_of_an_adapter_are_its_own() -> None:
    """A prompt finds the blocks of its own adapter's requests, never another adapter's or the base's blocks."""
    items = build_items(1)
    decoder = build_decoder(items)
    engine = build_engine(decoder, items)
    adapters = dict(itertools.islice(build_adapters(decoder).items(), 2))
    for key, adapter in adapters.items():
        engine.load_adapter(key, adapter)
    prompt = prompt_of(items, 30, 3)

    for key in ("", *adapters):
        for again in (False, True):
            engine.add_rank("one", prompt, k=8, adapter=key)
            assert drain(engine)["one"].num_cached_tokens == (28 if again else 0)


def test_more_adapters_than_slots_take_turns() -> None:
    """With one slot, two adapters' requests alternate and stay exact; an adapter without a slot is refused."""
    items = build_items(1)
    decoder = build_decoder(items)
    adapters = dict(itertools.islice(build_adapters(decoder).items(), 4, 6))
    engine = build_engine(decoder, items, max_running=1)
    for key, adapter in adapters.items():
        engine.load_adapter(key, adapter)
    prompt = prompt_of(items, 12, 3)
    first, second = adapters

    for key in (first, second, first):
        engine.add_rank("one", prompt, k=8, adapter=key)
        expected = rank_alone(merged(decoder, adapters[key]), items, prompt)
        np.testing.assert_allclose(drain(engine)["one"].scores, expected.scores, atol=1e-5)
    engine.add_rank("one", prompt, k=8, adapter=first)
    with pytest.raises(Overloaded):
        engine.add_rank("two", prompt, k=8, adapter=second)
    drain(engine)
    engine.add_rank("two", prompt, k=8, adapter=second)
    assert drain(engine)["two"].status == "stop"


def load_unknown(engine: Engine, decoder: Decoder) -> None:
    """Ask for an adapter that is not loaded."""
    engine.add_rank("one", [0], k=1, adapter="none")


def load_too_wide(engine: Engine, decoder: Decoder) -> None:
    """Load an adapter of a higher rank than the slots'."""
    engine.load_adapter("wide", build_adapter(decoder, 17, 0))


@pytest.mark.parametrize(
    ("act", "knobs", "error", "field"),
    [
        (load_unknown, {}, InvalidRequest, "adapter"),
        (load_too_wide, {}, ConfigError, "adapter_rank"),
        (load_too_wide, {"adapter_memory_mib": 1, "adapter_rank": 10**6}, ConfigError, "adapter_memory_mib"),
    ],
)
def test_an_adapter_that_cannot_serve_is_refused_by_field(act, knobs, error, field) -> None:
    """The error names the field or setting, and the value that would work."""
    items = build_items(1)
    decoder = build_decoder(items)
    engine = build_engine(decoder, items, **knobs)

    with pytest.raises(error) as caught:
        act(engine, decoder)
    assert f"{field}: " in str(caught.value)
    assert "; " in str(caught.value)


class AdapterPoolMachine(RuleBasedStateMachine):
    """Any order of requests: a slot in use keeps its adapter, and no two adapters share a slot."""

    def __init__(self) -> None:
        super().__init__()
        decoder = build_decoder(build_items(1), layers=1)
        self.adapters = {f"a{number}": build_adapter(decoder, number, number) for number in range(1, 6)}
        config = EngineConfig(adapter_rank=5, max_running=3)
        self.pool = AdapterPool(config, decoder.config, torch.float32, torch.device("cpu"))
        self.held: list[tuple[str, int]] = []
        self.now_s = 0.0
        for key, adapter in self.adapters.items():
            self.pool.add(key, adapter)
        self.loaded = set(self.adapters)

    @rule(key=st.sampled_from([f"a{number}" for number in range(1, 6)]), passed_s=st.sampled_from([0.0, 1.0, 20.0]))
    def ask(self, key: str, passed_s: float) -> None:
        """Ask for a slot. A refusal means that requests hold slots: an adapter waits for one of them."""
        self.now_s += passed_s
        try:
            self.held.append((key, self.pool.acquire(key, self.now_s)))
        except Overloaded:
            assert self.held
            assert key in self.loaded
        except InvalidRequest:
            assert key not in self.loaded

    @rule(key=st.sampled_from([f"a{number}" for number in range(1, 6)]), is_loaded=st.booleans())
    def load(self, key: str, is_loaded: bool) -> None:
        """Load or unload an adapter, also while requests use it."""
        if is_loaded:
            self.pool.add(key, self.adapters[key])
            self.loaded.add(key)
        else:
            self.pool.remove(key)
            self.loaded.discard(key)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """End a request."""
        key, _ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(key, self.now_s)

    @invariant()
    def slots_hold_their_adapters(self) -> None:
        """Each held slot has the matrices of its adapter; without adapters the slots take no memory."""
        assert (self.pool.slots is not None) is bool(self.loaded or self.held)
        if self.pool.slots is None:
            return
        matrix = self.pool.slots.layers[0]["output"]
        for key, slot in self.held:
            pair = self.adapters[key].pairs["layers.0.output"]
            assert torch.equal(matrix.down_SPRI[slot, 0, : len(pair.a_RI)], pair.a_RI)
            assert not matrix.down_SPRI[slot, 0, len(pair.a_RI) :].any()
            assert int(self.pool.slots.ranks[slot]) == len(pair.a_RI)
        by_slot = {slot: key for key, slot in self.held}
        assert len(by_slot) == len({key for key, _ in self.held})


TestAdapterPool = AdapterPoolMachine.TestCase
TestAdapterPool.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_an_adapter_whose_scores_are_not_finite_fails_only_its_own_requests() -> None:
    """Finite weights can overflow: the base's request in the same step gets the same result as by itself."""
    items = build_items(2)
    decoder, prompt = build_decoder(items), prompt_of(items, 9, 0)
    expected = rank_alone(decoder, items, prompt)
    pairs = build_adapter(decoder, 4, 0).pairs
    huge = {name: pair._replace(a_RI=1e30 * pair.a_RI, b_NR=1e30 * pair.b_NR) for name, pair in pairs.items()}
    engine = build_engine(decoder, items)
    engine.load_adapter("huge", Adapter(pairs=huge))

    engine.add_rank("base", prompt, k=8, beam_width=8)
    engine.add_rank("bad", prompt, k=8, beam_width=8, adapter="huge")
    outcomes = drain(engine)

    assert outcomes["bad"].status is SequenceStatus.FAILED
    assert outcomes["base"].status is SequenceStatus.DONE
    assert outcomes["base"].item_indices.tolist() == expected.item_indices.tolist()
    engine.check_integrity()
