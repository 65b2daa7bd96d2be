"""Scripts of requests, cancellations and steps for engines, and each request's expected outcome when run by itself."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from hypothesis import strategies as st

from models.decoder.decoder import Decoder
from models.decoder.window import Window
from services.llm.engine.beam.trie import ItemCodes
from services.llm.engine.config import EngineConfig
from services.llm.engine.engine import Engine
from services.llm.engine.gpu.graph_device import GraphDevice
from services.llm.engine.outcome import EngineOutcome, SequenceStatus
from services.llm.engine.plan import StepSize
from services.llm.engine.sampling_parameters import SamplingParams
from tests.support.engine.engines import build_decoder, build_items, drain

SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=1.5, seed=3),
    SamplingParams(temperature=0.7, top_k=9, top_p=0.9, min_p=0.01, num_logprobs=2),
    SamplingParams(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.1, logit_bias={3: 2.0}),
)
STOPS = (1, 2, 3, 4, 5, 6, 7, 8)
LIMITS = {"num_blocks": 60, "max_num_batched_tokens": 32, "max_chunk_tokens": 12, "max_beam_rows": 64, "max_running": 5}

Action = tuple[str, int, int]
actions = st.one_of(
    st.tuples(st.sampled_from(["rank", "late rank"]), st.integers(0, 30), st.integers(1, 30)),
    st.tuples(st.sampled_from(["text", "masked", "choices", "late text"]), st.integers(0, 30), st.integers(1, 12)),
    st.tuples(st.just("cancel"), st.integers(0, 12), st.just(0)),
    st.tuples(st.just("step"), st.integers(1, 4), st.just(0)),
)
scripts = st.lists(actions, max_size=14)


@dataclass(frozen=True, slots=True)
class World:
    """A catalogue of this depth and a decoder with this window.

    Texts have up to 12 tokens, times `longest`, or end at a third of them.
    """

    depth: int
    window: Window | None = None
    longest: int = 1
    stops: bool = True

    def engine(self, device: GraphDevice | None = None, *, warms_up: bool = True, **knobs: int | bool) -> Engine:
        """Build an engine over it, with little memory; with a device it replays its steps."""
        items, decoder = _built(self.depth, self.window)
        config = EngineConfig(block_tokens=4, tile_tokens=64, cpu_kernels="torch", **LIMITS | knobs)
        engine = Engine(decoder, config, items=items, bundle_version="v1", graph_device=device)
        if warms_up:
            engine.warm_up()
        return engine


@cache
def _built(depth: int, window: Window | None) -> tuple[ItemCodes, Decoder]:
    items = build_items(depth)
    return items, build_decoder(items, window=window)


class EvenAndOdd:
    """A mask that allows odd and even tokens in turn."""

    failure: str | None = None

    def __init__(self) -> None:
        self._num_taken = 0

    def allowed(self) -> np.ndarray:
        return np.full(3, 0x55555555 if self._num_taken % 2 else 0xAAAAAAAA, dtype=np.uint32).view(np.int32)

    def take(self, token_id: int) -> None:
        """Check and count a token."""
        assert token_id % 2 != self._num_taken % 2
        self._num_taken += 1

    def fork(self) -> "EvenAndOdd":
        return copy.copy(self)


def prompt_of(seed: int) -> list[int]:
    """Draw a prompt of 1 to 30 tokens; some share their beginning."""
    rng = np.random.default_rng(seed)
    return [*range(1, 1 + 4 * (seed % 3)), *rng.integers(1, 17, int(rng.integers(1, 22))).tolist()]


class Play:
    """Runs a script on one engine and records requests, outcomes, the tokens of texts, and the sizes of steps."""

    def __init__(self, world: World, engine: Engine) -> None:
        self.world = world
        self.engine = engine
        self.ended: dict[str, EngineOutcome] = {}
        self.tokens: dict[str, list[int]] = {}
        self.sizes: list[StepSize] = []
        self.added: dict[str, tuple[str, int, int, int]] = {}
        self._now_s = 0.0

    def run(self, script: Sequence[Action]) -> "Play":
        """Run the script, then step until every request has ended."""
        for turn, (kind, number, size) in enumerate(script):
            if kind == "step":
                for _ in range(number):
                    self.step()
            elif kind == "cancel":
                self.engine.cancel(f"{number}")
            else:
                for choice in range(2 if kind == "choices" else 1):
                    self.add(f"{turn}.{choice}" if choice else f"{turn}", kind, number, size, choice)
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

    def add(self, name: str, kind: str, number: int, size: int, choice: int = 0) -> None:
        """Add a request; a late request has a deadline after `size` steps, the second choice waits for the first."""
        self.added[name] = (kind, number, size, choice)
        times = {"now_s": self._now_s, "deadline_s": self._now_s + size if kind.startswith("late") else None}
        prompt = prompt_of(number)
        if kind.endswith("rank"):
            excluded = np.arange(number % 20)
            self.engine.add_rank(name, prompt, k=min(size, 9), excluded=excluded, beam_width=size, **times)
            return
        self.engine.add_text(
            name,
            prompt,
            max_new_tokens=size * self.world.longest,
            sampling=SAMPLINGS[(number + choice) % len(SAMPLINGS)],
            stop_token_ids=STOPS if self.world.stops else (),
            mask=EvenAndOdd() if kind == "masked" else None,
            after=name.partition(".")[0] if choice else None,
            **times,
        )


@cache
def alone(world: World, kind: str, number: int, size: int, choice: int) -> EngineOutcome:
    """Return the outcome of a request without a deadline in a separate synchronous engine with ample memory."""
    play = Play(world, world.engine(is_asynchronous=False, num_blocks=200))
    play.add("alone", kind.removeprefix("late "), number, size, choice)
    return drain(play.engine)["alone"]


def assert_as_alone(play: Play) -> None:
    """Compare everything that a caller sees of each request, and assert that all blocks are free."""
    assert play.ended.keys() == play.added.keys()
    for name, outcome in play.ended.items():
        assert_same_answer(outcome, alone(play.world, *play.added[name]))
        assert play.tokens.get(name, []) == list(outcome.token_ids)
    assert play.engine.load().kv_cache_usage == 0


def assert_same_answers(outcomes: dict[str, EngineOutcome], wanted: dict[str, EngineOutcome]) -> None:
    """Compare the answers of all requests."""
    assert outcomes.keys() == wanted.keys()
    for name, outcome in wanted.items():
        assert_same_answer(outcomes[name], outcome)


def assert_same_answer(outcome: EngineOutcome, wanted: EngineOutcome) -> None:
    """Compare everything that a caller sees of an outcome; for a truncated outcome, its beginning."""
    if outcome.status in (SequenceStatus.CANCELLED, SequenceStatus.LATE):
        assert outcome.token_ids == wanted.token_ids[: len(outcome.token_ids)]
        assert not len(outcome.item_indices)
        return
    assert outcome.status is wanted.status
    assert outcome.token_ids == wanted.token_ids
    assert outcome.item_indices.tolist() == wanted.item_indices.tolist()
    np.testing.assert_allclose(outcome.scores, wanted.scores, atol=1e-4)
