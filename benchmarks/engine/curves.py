"""The cost of a ranking by catalogue size and history length.

    python -m benchmarks.engine curves --json OUT [--rounds N]

One request at a time on one thread, fp32, random weights of a small stated shape. The cases of a curve
alternate round after round, and each figure is a median over the rounds: wall time, and CPU time, which other load on
the machine hardly affects. States: `cold` (a history never seen), `warm` (the same again), `new_event` (the same with
one more item, like a user's next request).
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from benchmarks.load.command import about_run, at_least_one, report_parser, write_report
from models.decoder.config import DecoderConfig
from models.decoder.decoder import Decoder
from services.llm.engine.beam.trie import ItemCodes
from services.llm.engine.config import EngineConfig
from services.llm.engine.engine import Engine
from services.llm.engine.outcome import EngineOutcome

LEVEL_SIZE = 256
BLOCK_TOKENS = 16
_MAX_POSITIONS = 4_096
_SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
SIZES = (1_000, 10_000, 100_000, 1_000_000)
HISTORIES = (25, 50, 100, 200, 400, 800)
_USUAL_HISTORY, _USUAL_WIDTH, _USUAL_SIZE = 50, 32, 100_000


@dataclass(frozen=True, slots=True)
class Elapsed:
    """The time of one ranking: wall milliseconds and CPU milliseconds, which other load hardly affects."""

    ms: float
    cpu_ms: float


@dataclass(slots=True)
class RankingRunner:
    """Ranks on one engine over one catalogue, after histories of random items."""

    engine: Engine
    items: ItemCodes
    rng: np.random.Generator
    num_asked: int = 0

    def history(self, num_items: int) -> np.ndarray:
        """Draw item indices."""
        return self.rng.integers(0, len(self.items.codes), num_items)

    def rank(self, history: np.ndarray, *, k: int = 10, width: int = 32) -> Elapsed:
        """Rank items outside the history with one request in flight; return the time from request to result."""
        prompt = prompt_of(self.items, history)
        self.num_asked += 1
        began, began_cpu = time.perf_counter(), time.process_time()
        self.engine.add_rank(str(self.num_asked), prompt, k=k, beam_width=width, excluded=history)
        [outcome] = [ended for _ in range(1 + self.items.codes.shape[1]) for ended in self._step()]
        taken = Elapsed(1e3 * (time.perf_counter() - began), 1e3 * (time.process_time() - began_cpu))
        assert len(outcome.item_indices) == k, "a ranking came up short"
        return taken

    def _step(self) -> list[EngineOutcome]:
        return self.engine.step(0.0) if self.engine.has_work else []


Case = tuple[dict[str, Any], Callable[[], Elapsed]]


def main() -> None:
    """Measure all curves and write them."""
    parser = report_parser(__doc__)
    parser.add_argument("--rounds", type=at_least_one, default=15, help="rounds of each median")
    options = parser.parse_args()
    torch.set_num_threads(1)
    decoder = random_decoder(1 + 3 * LEVEL_SIZE)
    callers = {}
    for size in SIZES:
        items = random_items(size, 3)
        callers[size] = RankingRunner(build_engine(decoder, items), items, np.random.default_rng(size))
    usual = callers[_USUAL_SIZE]
    shown = {
        **about_run("engine curves"),
        "model": _SHAPE | {"dtype": "float32", "codes": [LEVEL_SIZE] * 3, "block_tokens": BLOCK_TOKENS},
        "rounds": options.rounds,
        "catalogue": _measure("catalogue", list(_by_size(callers)), options.rounds),
        "history": _measure("history", list(_by_history(usual)), options.rounds),
    }
    shown["catalogue_ratio"] = {figure: flatness(shown["catalogue"], figure) for figure in ("ms", "cpu_ms")}
    write_report(options.json, shown)


def _measure(title: str, cases: list[Case], rounds: int) -> list[dict[str, Any]]:
    taken: list[list[Elapsed]] = [[] for _ in cases]
    for _, ask in cases:
        ask()
    for _ in track(range(rounds), title.ljust(20), console=Console(stderr=True)):
        for (_, ask), samples in zip(cases, taken, strict=True):
            samples.append(ask())
    return [
        about | {name: round(median(getattr(sample, name) for sample in samples), 3) for name in ("ms", "cpu_ms")}
        for (about, _), samples in zip(cases, taken, strict=True)
    ]


def _states(caller: RankingRunner, num_items: int, width: int) -> dict[str, Callable[[], Elapsed]]:
    """Return the rankings of a new history, a known history, and a known history with one more item."""
    known = caller.history(num_items)
    k = min(10, width)
    return {
        "cold": lambda: caller.rank(caller.history(num_items), k=k, width=width),
        "warm": lambda: caller.rank(known, k=k, width=width),
        "new_event": lambda: caller.rank(np.append(known, caller.history(1)), k=k, width=width),
    }


def _by_size(callers: dict[int, RankingRunner]) -> Iterator[Case]:
    for state in ("cold", "new_event"):
        for size, caller in callers.items():
            ask = _states(caller, _USUAL_HISTORY, _USUAL_WIDTH)[state]
            yield {"num_items": size, "history_items": _USUAL_HISTORY, "beam_width": _USUAL_WIDTH, "state": state}, ask


def _by_history(caller: RankingRunner) -> Iterator[Case]:
    for num_items in HISTORIES:
        for state, ask in _states(caller, num_items, _USUAL_WIDTH).items():
            about = {"history_items": num_items, "prompt_tokens": 1 + 3 * num_items, "beam_width": _USUAL_WIDTH}
            yield about | {"num_items": _USUAL_SIZE, "state": state}, ask


def flatness(rows: list[dict[str, Any]], figure: str) -> dict[str, float]:
    """Return the ratio of the highest to the lowest cost over sizes, by state."""
    by_state: dict[str, list[float]] = {}
    for row in rows:
        by_state.setdefault(row["state"], []).append(row[figure])
    return {state: round(max(values) / min(values), 3) for state, values in by_state.items()}


def random_items(num_items: int, depth: int, seed: int = 0, skew: float = 1.0) -> ItemCodes:
    """Draw a catalogue.

    At depth 1 each item has its own code; at greater depth a level has 256 codes, concentrated on small codes by `skew`
    > 1.
    """
    rng = np.random.default_rng(seed)
    sizes = (num_items,) if depth == 1 else (LEVEL_SIZE,) * depth
    drawn = (LEVEL_SIZE * rng.random((num_items, depth)) ** skew).astype(np.int32)
    codes = np.arange(num_items, dtype=np.int32)[:, None] if depth == 1 else drawn
    return ItemCodes(
        codes=codes, level_sizes=sizes, token_offsets=tuple(1 + sum(sizes[:level]) for level in range(depth))
    )


def random_decoder(vocab_size: int, *, seed: int = 0, shape: dict[str, Any] = _SHAPE) -> Decoder:
    """Draw a decoder in fp32."""
    torch.manual_seed(seed)
    positions = {"max_position_embeddings": _MAX_POSITIONS}
    return Decoder(DecoderConfig(vocab_size=vocab_size, **{**positions, **shape})).eval()


def prompt_of(items: ItemCodes, history: np.ndarray) -> list[int]:
    """Return the tokens that encode a history of items, after the start token."""
    return [0, *(items.codes[history] + np.array(items.token_offsets)).ravel().tolist()]


def build_engine(decoder: Decoder, items: ItemCodes) -> Engine:
    """Build an engine with room for a few hundred histories."""
    config = EngineConfig(
        block_tokens=BLOCK_TOKENS, num_blocks=4_096, max_num_batched_tokens=4_096, max_chunk_tokens=4_096
    )
    return Engine(decoder, config, items=items, bundle_version="curves")
