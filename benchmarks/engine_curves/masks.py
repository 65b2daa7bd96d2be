"""What a catalogue's trie and a request's masks cost by themselves: seconds to build, bytes, milliseconds for each request."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.engine_curves.engines import random_items
from services.llm.engine.beam.item_mask import SurvivorMasks
from services.llm.engine.beam.trie import Trie

_NUM_SEEN = 200
_NUM_RUNS = 9


def catalogue_costs(num_items: int) -> list[dict[str, Any]]:
    """Measure catalogues of this many items at each depth, evenly spread and, at depth 3, crowded."""
    shapes = [(1, 1.0), (2, 1.0), (3, 1.0), (3, 2.0), (4, 1.0)]
    return [_costs(num_items, depth, skew) for depth, skew in shapes]


def _costs(num_items: int, depth: int, skew: float) -> dict[str, Any]:
    items = random_items(num_items, depth, skew=skew)
    began = time.perf_counter()
    trie = Trie(items, torch.device("cpu"))
    masks = SurvivorMasks(trie)
    build_s = time.perf_counter() - began
    rng = np.random.default_rng(0)
    seen, nothing = rng.integers(0, num_items, _NUM_SEEN), np.zeros(0, dtype=np.int64)
    kept = rng.random(num_items) < 0.5

    def ask_with_new_filter() -> None:
        kept[rng.integers(num_items)] ^= True
        masks.of(kept, nothing)

    return {
        "num_items": num_items,
        "depth": depth,
        "skew": skew,
        "build_s": round(build_s, 3),
        "trie_mb": round(trie.num_bytes / 1e6, 1),
        "on_device_mb": round(sum(level.num_bytes for level in trie.levels) / 1e6, 1),
        "widest_node": max(level.max_children for level in trie.levels),
        "items_seen": _NUM_SEEN,
        "mask_seen_ms": _median_ms(lambda: masks.of(None, seen)),
        "mask_known_filter_ms": _median_ms(lambda: masks.of(kept, seen)),
        "mask_new_filter_ms": _median_ms(ask_with_new_filter),
    }


def _median_ms(act: Callable[[], object]) -> float:
    taken_ms = []
    for _ in range(_NUM_RUNS):
        began = time.perf_counter()
        act()
        taken_ms.append(1e3 * (time.perf_counter() - began))
    return round(median(taken_ms), 3)
