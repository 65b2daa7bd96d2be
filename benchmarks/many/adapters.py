"""Adapters in one engine: requests of eight adapters of mixed rank in one batch, against the base without adapters.

    python -m benchmarks.many adapters --json OUT [--rounds 10]

The engine ranks by beams over a made-up catalogue, in this process, on one thread. Both engines share the decoder's
weights: one has no adapters, the other has eight loaded. Each round runs the same requests on the first engine, on the
second without adapters, and on the second with an adapter each, in turn. Prompts are new in every batch, so nothing is
cached. Reported are medians over the rounds of the CPU time of all steps, and of its ratio to the first; and the
largest difference of a score from an engine whose weights have the adapter merged in.
"""

import copy
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch

from benchmarks.load.command import ReportOptions, about_run, write_report
from models.decoder.adapter import Adapter, LowRank, merge_adapter, projections_of
from models.decoder.config import DecoderConfig
from models.decoder.decoder import Decoder
from pipelines.declaration import Option, parsed
from services.llm.engine.beam.trie import ItemCodes
from services.llm.engine.config import EngineConfig
from services.llm.engine.engine import Engine

_RANKS = (2, 4, 4, 8, 8, 8, 16, 16)
_LEVELS, _NUM_ITEMS, _SPECIAL = (256, 256, 256), 10_000, 3
_SIZES: dict[str, dict[str, Any]] = {
    "1 M, hidden 128": {"hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 4},
    "25 M, hidden 512": {"hidden_size": 512, "intermediate_size": 1_408, "num_hidden_layers": 8},
}
_CASES = {"rankings, 8 in a batch": (8, 60, 0), "texts, 8 in a batch": (8, 8, 16)}
"""Requests in a batch, tokens of their prompts, and new tokens of a text; 0 for a ranking."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterBenchOptions(ReportOptions):
    """Options of this benchmark."""

    rounds: Annotated[int, Option("Rounds of the three engines in turn.")] = 10


def main() -> None:
    """Measure, print each row, write the JSON after each."""
    options = parsed(AdapterBenchOptions, __doc__)
    torch.set_num_threads(1)
    report: dict[str, Any] = {**about_run("many adapters"), "ranks": _RANKS, "rows": []}
    for size, shape in _SIZES.items():
        decoder, items = _decoder(shape), _items()
        adapters = {f"adapter {number}": _adapter(decoder, rank, number) for number, rank in enumerate(_RANKS)}
        for case, (num_requests, num_tokens, num_new) in _CASES.items():
            row = {"decoder": size, "case": case} | _measure(
                decoder, items, adapters, options.rounds, (num_requests, num_tokens, num_new)
            )
            sys.stdout.write(f"{row}\n")
            sys.stdout.flush()
            report["rows"].append(row)
            write_report(options.json, report)


def _measure(
    decoder: Decoder, items: ItemCodes, adapters: dict[str, Adapter], rounds: int, sizes: tuple[int, int, int]
) -> dict[str, float]:
    plain, loaded = _engine(decoder, items), _engine(decoder, items)
    for key, adapter in adapters.items():
        loaded.load_adapter(key, adapter)
    cases = {"base": (plain, [""]), "base_beside_adapters": (loaded, [""]), "adapters": (loaded, [*adapters])}
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    rng = np.random.default_rng(0)
    for number in range(rounds + 1):
        prompts = rng.integers(1, decoder.config.vocab_size, (sizes[0], sizes[1])).tolist()
        for name, (engine, keys) in cases.items():
            spent_s = _run(engine, prompts, keys, sizes[2])
            if number:  # the first round warms up
                seconds[name].append(spent_s)
    ratios = {
        f"{name}_ratio": statistics.median(np.array(seconds[name]) / np.array(seconds["base"]))
        for name in cases
        if name != "base"
    }
    return {
        **{f"{name}_ms": 1e3 * statistics.median(spent) for name, spent in seconds.items()},
        **{name: float(ratio) for name, ratio in ratios.items()},
        "largest_difference": _largest_difference(decoder, items, adapters, loaded),
    }


def _run(engine: Engine, prompts: list[list[int]], keys: list[str], num_new: int) -> float:
    """Return the CPU seconds of all steps of these requests, which use these adapters in turn."""
    for number, prompt in enumerate(prompts):
        key = keys[number % len(keys)]
        if num_new:
            engine.add_text(str(number), prompt, max_new_tokens=num_new, adapter=key)
        else:
            engine.add_rank(str(number), prompt, k=10, adapter=key)
    began_s = time.process_time()
    while engine.has_work:
        engine.step(0.0)
    return time.process_time() - began_s


def _largest_difference(decoder: Decoder, items: ItemCodes, adapters: dict[str, Adapter], loaded: Engine) -> float:
    """Return the largest difference of an item's score, with all adapters in one batch."""
    prompt = np.random.default_rng(1).integers(1, decoder.config.vocab_size, 90).tolist()
    for key in adapters:
        loaded.add_rank(key, prompt, k=10, adapter=key)
    scores = _scores(loaded)
    largest = 0.0
    for key, adapter in adapters.items():
        merged = copy.deepcopy(decoder)
        merge_adapter(merged, adapter)
        engine = _engine(merged, items)
        engine.add_rank(key, prompt, k=10)
        expected = _scores(engine)[key]
        assert expected.keys() == scores[key].keys(), f"{key} lists other items"
        largest = max(largest, *(abs(expected[item] - score) for item, score in scores[key].items()))
    return largest


def _scores(engine: Engine) -> dict[str, dict[int, float]]:
    scores = {}
    while engine.has_work:
        for outcome in engine.step(0.0):
            scores[outcome.request_id] = dict(zip(outcome.item_indices.tolist(), outcome.scores.tolist(), strict=True))
    return scores


def _engine(decoder: Decoder, items: ItemCodes) -> Engine:
    return Engine(decoder, EngineConfig(num_blocks=2_048), items=items, bundle_version="benchmark")


def _items() -> ItemCodes:
    codes = np.random.default_rng(2).integers(0, _LEVELS[0], (_NUM_ITEMS, len(_LEVELS)))
    offsets = tuple(_SPECIAL + level * size for level, size in enumerate(_LEVELS))
    return ItemCodes(codes=codes, level_sizes=_LEVELS, token_offsets=offsets)


def _decoder(shape: dict[str, Any]) -> Decoder:
    torch.manual_seed(3)
    heads = shape["hidden_size"] // 64
    config = DecoderConfig(
        vocab_size=_SPECIAL + sum(_LEVELS),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=64,
        max_position_embeddings=512,
        **shape,
    )
    decoder = Decoder(config).eval().requires_grad_(False)
    for parameter in decoder.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    return decoder


def _adapter(decoder: Decoder, rank: int, seed: int) -> Adapter:
    draw, config = torch.Generator().manual_seed(seed), decoder.config
    pairs = {
        f"layers.{layer}.{row.name}": LowRank(
            torch.randn(rank, row.columns(config), generator=draw) / row.columns(config) ** 0.5,
            torch.randn(row.rows(config), rank, generator=draw) / rank**0.5,
            0.1,
        )
        for layer in range(config.num_hidden_layers)
        for row in projections_of(config)
    }
    return Adapter(pairs=pairs)


if __name__ == "__main__":
    main()
