"""Count the beams, of a million, that name a forbidden item while catalogues are replaced: must be 0.

    python -m benchmarks.engine validity --json OUT [--beams N]

Each round draws a catalogue (of depth 1 to 4, some skewed) and a decoder, like a new bundle, and requests as many items
as there are beams, with random histories, filters and seen items. The previous round's engine still has requests in
flight when the next one starts, and both are stepped alternately, as in a reload.
"""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from benchmarks.engine.curves import prompt_of, random_decoder, random_items
from benchmarks.load.command import about_run, at_least_one, report_parser, write_report
from services.llm.engine.beam.trie import ItemCodes
from services.llm.engine.config import EngineConfig
from services.llm.engine.engine import Engine
from services.llm.engine.outcome import EngineOutcome

_WIDTHS = (1, 8, 32, 128, 256, 512, 1_024)
_REQUESTS_PER_ROUND = 24
_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
}


def main() -> None:
    """Count until enough beams are checked."""
    parser = report_parser(__doc__)
    parser.add_argument("--beams", type=at_least_one, default=1_000_000, help="minimum number of beams to check")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("beams", total=options.beams)
        count = Count()
        for outcome_beams in judged(options.beams, count):
            progress.advance(bar, outcome_beams)
    seconds = round(time.perf_counter() - began, 1)
    write_report(options.json, about_run("engine validity") | {"seconds": seconds} | asdict(count))


@dataclass(slots=True)
class Count:
    """Counts of checked beams. Each beam of the last level is one item."""

    beams: int = 0
    rankings: int = 0
    catalogues: int = 0
    invalid: int = 0
    repeated: int = 0
    short: int = 0
    """Rankings with fewer items than beams although more are allowed."""


@dataclass(slots=True)
class Served:
    """One version's engine and its requests: mask and width of each."""

    engine: Engine
    items: ItemCodes
    asked: dict[str, tuple[np.ndarray, int]] = field(default_factory=dict)

    def ask(self, name: str, rng: np.random.Generator) -> None:
        """Request as many items as beams after a random history, with or without a filter."""
        num_items = len(self.items.codes)
        history = rng.integers(0, num_items, rng.integers(1, 30))
        allowed = rng.random(num_items) < rng.choice([0.002, 0.1, 0.9]) if rng.random() < 0.7 else None
        shown = np.ones(num_items, dtype=bool) if allowed is None else allowed.copy()
        shown[history] = False
        width = int(rng.choice(_WIDTHS))
        self.engine.add_rank(
            name, prompt_of(self.items, history), k=width, beam_width=width, allowed=allowed, excluded=history
        )
        self.asked[name] = shown, width

    def judge(self, outcome: EngineOutcome, count: Count) -> int:
        """Check an outcome against its mask; return its number of beams."""
        shown, width = self.asked.pop(outcome.request_id)
        items = outcome.item_indices
        count.beams += len(items)
        count.rankings += 1
        count.invalid += int((~shown[items]).sum())
        count.repeated += len(items) - len(np.unique(items))
        count.short += len(items) < min(width, int(shown.sum()))
        return len(items)


def judged(num_beams: int, count: Count) -> Iterator[int]:
    """Load catalogue after catalogue and check every outcome, yielding the beams of each, up to `num_beams`."""
    rng = np.random.default_rng(0)
    leaving: Served | None = None
    while count.beams < num_beams:
        coming = _load(rng, count)
        for number in range(_REQUESTS_PER_ROUND):
            coming.ask(str(number), rng)
            for served in filter(None, (leaving, coming)):
                for outcome in served.engine.step(0.0):
                    yield served.judge(outcome, count)
        if leaving is not None:
            yield from _drain(leaving, count)
        leaving = coming
    if leaving is not None:
        yield from _drain(leaving, count)


def _drain(served: Served, count: Count) -> Iterator[int]:
    while served.engine.has_work:
        for outcome in served.engine.step(0.0):
            yield served.judge(outcome, count)
    assert not served.asked, "a request without an answer"


def _load(rng: np.random.Generator, count: Count) -> Served:
    count.catalogues += 1
    depth = int(rng.integers(1, 5))
    items = random_items(
        int(rng.choice([300, 5_000, 40_000])), depth, seed=count.catalogues, skew=rng.choice([1.0, 3.0])
    )
    config = EngineConfig(num_blocks=512, max_beam_rows=2_048, max_waiting=_REQUESTS_PER_ROUND)
    decoder = random_decoder(1 + sum(items.level_sizes), seed=count.catalogues, shape=_SHAPE)
    return Served(Engine(decoder, config, items=items, bundle_version="v"), items)
