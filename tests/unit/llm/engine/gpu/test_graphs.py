"""An engine that replays captured steps gives the same outcomes as one that runs each step eagerly."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from services.llm.engine.config import EngineConfig
from services.llm.engine.engine import Engine
from services.llm.engine.gpu.graph_shapes import sizes_up_to
from services.llm.engine.outcome import EngineOutcome
from services.llm.engine.text.parameters import SamplingParams
from tests.support.replaying_device import ReplayingDevice
from tests.unit.llm.engine.conftest import build_decoder, build_items, drain

SMALL = {
    "num_blocks": 60,
    "block_tokens": 4,
    "max_running": 6,
    "max_beam_rows": 64,
    "tile_tokens": 64,
    "cpu_kernels": "torch",
}


def engine_with(device: ReplayingDevice | None, depth: int, **changes: Any) -> Engine:
    """Build an engine over a small random decoder and catalogue, with graphs or without."""
    items = build_items(depth)
    config = EngineConfig(**(SMALL | {"max_num_batched_tokens": 64, "max_chunk_tokens": 24} | changes))
    return Engine(build_decoder(items), config, items=items, bundle_version="v1", graph_device=device)


def both(depth: int, **changes: Any) -> tuple[Engine, Engine, ReplayingDevice]:
    """Build the same engine with graphs, warmed up, and without."""
    device = ReplayingDevice()
    graphed = engine_with(device, depth, **changes)
    graphed.warm_up()
    return graphed, engine_with(None, depth, **changes), device


def prompt_of(seed: int) -> list[int]:
    """Draw a prompt of 1 to 40 tokens."""
    rng = np.random.default_rng(seed)
    return rng.integers(1, 17, int(rng.integers(1, 40))).tolist()


def assert_same(found: dict[str, EngineOutcome], wanted: dict[str, EngineOutcome]) -> None:
    """Compare status, tokens and items of each request, and scores up to fp32's rounding."""
    assert found.keys() == wanted.keys()
    for name, outcome in wanted.items():
        assert found[name].status == outcome.status
        assert found[name].token_ids == outcome.token_ids
        assert found[name].item_indices.tolist() == outcome.item_indices.tolist()
        np.testing.assert_allclose(found[name].scores, outcome.scores, atol=1e-4)


GRID = pytest.mark.grid


@pytest.mark.parametrize("depth", [1, 2, pytest.param(3, marks=GRID), pytest.param(4, marks=GRID)])
def test_rankings_of_mixed_widths_equal_those_without_graphs(depth: int) -> None:
    """Requests of all widths at mixed levels get the same items and scores, and no step falls back to eager."""
    graphed, plain, device = both(depth)

    ended: list[dict[str, EngineOutcome]] = [{}, {}]
    for engine, outcomes in zip((graphed, plain), ended, strict=True):
        for index, width in enumerate([1, 3, 8, 20, 33, 50]):
            allowed = np.random.default_rng(index).random(50) < 0.8
            engine.add_rank(f"{index}", prompt_of(index), k=5 + index, allowed=allowed, beam_width=width)
            outcomes |= {outcome.request_id: outcome for outcome in engine.step(0.0)}
        outcomes |= drain(engine)

    assert len(ended[0]) == 6
    assert_same(*ended)
    assert graphed.graph_counts.late_captures == graphed.graph_counts.eager_fallbacks == 0
    assert device.num_replays > 0


def test_all_levels_after_the_first_are_one_replay() -> None:
    """Two rankings of four levels take two steps: their prompts, then one recording for the three levels of both."""
    graphed, plain, device = both(4)

    for engine in (graphed, plain):
        for name, width in (("narrow", 3), ("wide", 8)):
            engine.add_rank(name, [1, 2, 3], k=4, beam_width=width)
    found = {outcome.request_id: outcome for _ in range(2) for outcome in graphed.step(0.0)}

    assert_same(found, drain(plain))
    assert device.num_replays == 2


SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.9, seed=3),
    SamplingParams(num_logprobs=2),
    SamplingParams(presence_penalty=1.0, temperature=0.5, top_k=5),
)
actions = st.one_of(
    st.tuples(st.just("rank"), st.integers(0, 50), st.integers(1, 14)),
    st.tuples(st.just("text"), st.integers(0, 50), st.integers(1, 12)),
    st.tuples(st.just("cancel"), st.integers(0, 12), st.just(0)),
    st.tuples(st.just("step"), st.integers(1, 3), st.just(0)),
)


@pytest.mark.parametrize("num_scripts", [6, pytest.param(40, marks=GRID)])
def test_any_mix_of_requests_ends_as_without_graphs(num_scripts: int) -> None:
    """Texts and rankings that are added, preempted and cancelled between replays have the same outcomes."""

    @settings(max_examples=num_scripts, phases=[Phase.generate])
    @given(st.sampled_from([1, 2, 3]), st.sampled_from([12, 60]), st.lists(actions, max_size=14))
    def hold(depth: int, num_blocks: int, script: list[tuple[str, int, int]]) -> None:
        compare_with_and_without_graphs(depth, num_blocks, script)

    hold()


def compare_with_and_without_graphs(depth: int, num_blocks: int, script: list[tuple[str, int, int]]) -> None:
    """Run a script on both engines, with few shapes so that the warm-up is short."""
    ended: list[dict[str, EngineOutcome]] = []
    for device in (ReplayingDevice(), None):
        engine = engine_with(device, depth, num_blocks=num_blocks, max_running=3, max_beam_rows=16)
        engine.warm_up()
        ended.append(played(engine, script))
        assert engine.graph_counts.late_captures == engine.graph_counts.eager_fallbacks == 0

    assert_same(*ended)


def played(engine: Engine, script: list[tuple[str, int, int]]) -> dict[str, EngineOutcome]:
    """Run a script of requests, cancellations and steps, then drain the engine."""
    outcomes: dict[str, EngineOutcome] = {}
    for index, (kind, number, size) in enumerate(script):
        if kind == "rank":
            excluded = np.arange(number % 20)
            engine.add_rank(f"{index}", prompt_of(number), k=min(size, 9), excluded=excluded, beam_width=size)
        elif kind == "text":
            sampling = SAMPLINGS[number % len(SAMPLINGS)]
            engine.add_text(
                f"{index}", prompt_of(number)[:30], max_new_tokens=size, sampling=sampling, stop_token_ids=[5]
            )
        elif kind == "cancel":
            engine.cancel(f"{number}")
        else:
            for _ in range(number):
                outcomes |= {outcome.request_id: outcome for outcome in engine.step(0.0)}
    return outcomes | drain(engine)


def test_preempted_texts_continue_where_they_were() -> None:
    """Preempted and recomputed texts have the same tokens with graphs and without."""
    graphed, plain, device = both(1, num_blocks=14)

    for engine in (graphed, plain):
        for index in range(5):
            engine.add_text(f"{index}", prompt_of(index)[:9], max_new_tokens=20)

    found, wanted = drain(graphed), drain(plain)
    assert_same(found, wanted)
    assert sum(outcome.num_preemptions for outcome in found.values()) > 0
    assert device.num_replays > 20


def test_token_masks_are_computed_while_the_device_runs() -> None:
    """The token mask is computed after the step has started, for the prefill and for each replay."""
    graphed, _, device = both(1)
    replays_at_call: list[int] = []

    class Everything:
        """A grammar that allows every token."""

        def allowed(self) -> np.ndarray:
            """Allow every token, and note the number of replays so far."""
            replays_at_call.append(device.num_replays)
            return np.full(2, -1, dtype=np.int32)

        def take(self, token_id: int) -> None:
            """Change nothing."""

    graphed.add_text("held", prompt_of(1), max_new_tokens=3, mask=Everything())
    drain(graphed)

    assert replays_at_call == [1, 2, 3]


def test_a_step_without_a_shape_runs_eagerly_and_is_counted() -> None:
    """More items than the widest shape has beams: the answer is the same, and the fallback is counted."""
    graphed, plain, _ = both(2, max_beam_rows=16)

    for engine in (graphed, plain):
        engine.add_rank("wide", prompt_of(1), k=40, beam_width=16)

    assert_same(drain(graphed), drain(plain))
    assert graphed.graph_counts.eager_fallbacks == 1
    assert graphed.graph_counts.late_captures == 0


def test_shapes_are_captured_once_before_or_late() -> None:
    """The warm-up reports each shape once; without it the first step of a shape captures it late, and the second does not."""
    warm, late, progress = ReplayingDevice(), ReplayingDevice(), list[tuple[int, int]]()
    engine_with(warm, 3).warm_up(lambda done, total: progress.append((done, total)))
    engine = engine_with(late, 2)

    for name in ("first", "second"):
        engine.add_rank(name, prompt_of(1), k=5, beam_width=8)
        drain(engine)

    total = len(warm.recordings)
    assert progress == [(done, total) for done in range(1, total + 1)]
    assert engine.graph_counts.late_captures == len(late.recordings) == 1
    assert late.num_replays == 2


@pytest.mark.parametrize(("change", "message"), [("input", "was replaced"), ("operation", "another way")])
def test_the_stand_in_refuses_what_a_graph_cannot_replay(change: str, message: str) -> None:
    """A graph reads new contents of the memory that it captured, but neither another tensor nor other operations."""
    inputs, operations = [torch.ones(2)], [torch.neg]
    recording = ReplayingDevice().capture(lambda: (operations[-1](inputs[-1]),), inputs[:])
    inputs[0].fill_(4.0)
    recording.replay()
    assert recording.outputs[0].tolist() == [-4.0, -4.0]
    inputs.append(torch.zeros(2)) if change == "input" else operations.append(torch.abs)

    with pytest.raises(AssertionError, match=message):
        recording.replay()


def test_sizes_round_up_to_powers_of_two_and_the_largest() -> None:
    """Every count up to the largest has a size less than twice its own."""
    assert [sizes_up_to(largest) for largest in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]
