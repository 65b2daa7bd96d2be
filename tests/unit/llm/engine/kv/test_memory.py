"""Two engines over a shared KV memory, as during a bundle swap, return the same results as separate engines."""

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.llm.engine.config import EngineConfig
from services.llm.engine.engine import Engine
from services.llm.engine.kv.memory import KvMemory
from services.llm.engine.outcome import EngineOutcome
from services.llm.engine.plan import StepPlan
from services.llm.engine.runner import RunningStep
from tests.support.engine.engine_scripts import assert_same_answers
from tests.support.engine.engines import SMALL, build_decoder, build_items, drain

CONFIG = EngineConfig(**SMALL | {"num_blocks": 24, "max_num_batched_tokens": 32, "is_asynchronous": True})
ITEMS = build_items(3)
DECODERS = [build_decoder(ITEMS), build_decoder(ITEMS)]
with torch.no_grad():
    DECODERS[1].embedding.weight += 0.3 * torch.randn_like(DECODERS[1].embedding.weight)
PROMPT = list(range(1, 18))


def build(version: int, memory: KvMemory | None = None) -> Engine:
    return Engine(DECODERS[version], CONFIG, items=ITEMS, bundle_version=f"v{version}", memory=memory)


def add(engine: Engine, name: str, kind: str, size: int) -> None:
    if kind == "rank":
        engine.add_rank(name, [*PROMPT[:size], size], k=4, beam_width=6)
    else:
        engine.add_text(name, [*PROMPT[:size], size], max_new_tokens=size)


requests = st.tuples(st.integers(0, 1), st.sampled_from(["rank", "text"]), st.integers(1, 16))
scripts = st.lists(st.one_of(requests, st.tuples(st.integers(0, 1), st.just("step"), st.integers(1, 3))), max_size=12)


@settings(max_examples=8)
@given(scripts)
def test_any_mix_on_two_versions_ends_as_on_engines_of_their_own(script: list[tuple[int, str, int]]) -> None:
    """In a pool too small for all requests, both versions' requests, stepped in any order, get their own results."""
    first = build(0)
    engines = [first, build(1, first.memory)]
    alone = [build(0), build(1)]
    outcomes: list[dict[str, EngineOutcome]] = [{}, {}]

    for turn, (version, kind, size) in enumerate(script):
        if kind != "step":
            add(engines[version], f"{turn}", kind, size)
            add(alone[version], f"{turn}", kind, size)
        for _ in range(size if kind == "step" else 0):
            outcomes[version] |= {outcome.request_id: outcome for outcome in engines[version].step(0.0)}
            first.check_integrity(engines[1])
    while any(engine.has_work for engine in engines):
        for version, engine in enumerate(engines):
            outcomes[version] |= {outcome.request_id: outcome for outcome in engine.step(0.0)}
            first.check_integrity(engines[1])

    for ended, engine in zip(outcomes, alone, strict=True):
        assert_same_answers(ended, drain(engine))


def test_an_engine_without_free_blocks_waits_and_a_failed_one_gives_them_back() -> None:
    """While the other engine holds the pool, the new engine waits; it runs after the other engine is closed."""
    old = build(0)
    new = build(1, old.memory)
    old.add_text("long", PROMPT * 5, max_new_tokens=2)
    old.step(0.0)
    new.add_rank("0", [*PROMPT, *PROMPT], k=3)
    assert new.step(0.0) == []
    assert new.is_blocked

    old.close()

    assert drain(new, old)["0"].item_indices.tolist()
    assert not new.is_blocked
    assert old.memory.pool.num_held == 0


@pytest.mark.parametrize("changes", [{"block_tokens": 8}, {"num_blocks": 25}, {"kv_kind": "int8"}])
def test_memory_that_does_not_fit_is_not_taken(changes) -> None:
    """An engine with another block size, number of blocks or KV kind allocates its own memory."""
    first = build(0)

    second = Engine(DECODERS[1], replace(CONFIG, **changes), items=ITEMS, bundle_version="v1", memory=first.memory)

    assert second.memory is not first.memory
    assert build(1, first.memory).memory is first.memory


class OrderedStream:
    """A replacement for CUDA streams that logs marks and dependencies."""

    log: ClassVar[list[tuple[str, object]]] = []

    def __init__(self, device: torch.device) -> None:
        pass

    entered = lambda self: torch.inference_mode()  # noqa: E731

    def mark(self) -> None:
        self.log.append(("mark", self))

    def follow(self, others: list[object]) -> None:
        self.log.append(("follow", (self, tuple(others))))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object]]:
    """Log of marks and dependencies between the engines' streams."""
    monkeypatch.setattr("services.llm.engine.engine.DeviceStream", OrderedStream)
    monkeypatch.setattr(OrderedStream, "log", [])
    return OrderedStream.log


def test_a_step_follows_what_the_other_engine_started(log, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step waits for the other engine's last step, and is marked before its blocks are freed."""
    old = build(0)
    new = build(1, old.memory)
    free = old.memory.pool.release
    monkeypatch.setattr(old.memory.pool, "release", lambda blocks: (log.append(("free", None)), free(blocks)))
    add(old, "0", "rank", 3)
    drain(old, new)
    add(new, "0", "rank", 3)
    drain(new, old)

    wanted = [("follow", (old.stream, (new.stream,))), ("mark", old.stream)] * 3 + [("free", None)]
    wanted += [("follow", (new.stream, (old.stream,))), ("mark", new.stream)] * 3 + [("free", None)]
    assert log == wanted


def test_a_step_that_fails_while_it_is_started_is_followed_too(log, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed step is marked too: the work it started may still run when the engine frees its blocks."""
    failing = build(0)

    def fail(plan: StepPlan) -> RunningStep:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(failing._runner, "submit", fail)
    add(failing, "0", "rank", 3)

    with pytest.raises(torch.OutOfMemoryError):
        failing.step(0.0)

    assert log[-1] == ("mark", failing.stream)
