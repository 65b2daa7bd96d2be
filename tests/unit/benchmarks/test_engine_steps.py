"""The time of a step is counted for that step, also where the host is ahead of the device."""

import numpy as np
import pytest
import torch

from benchmarks.engine.shapes import random_decoder
from benchmarks.engine.tailrace import drain
from services.llm.engine.beam.trie import ItemCodes
from services.llm.engine.config import EngineConfig
from services.llm.engine.engine import Engine


class DoublingClock:
    """A clock with 1, 2, 4 and so on seconds between its stamps, so that a sum identifies its terms."""

    def __init__(self) -> None:
        self.num_stamps = 0

    def stamp(self) -> None:
        """Count."""
        self.num_stamps += 1

    def intervals(self) -> list[float]:
        """Return powers of two."""
        return [2.0**place for place in range(self.num_stamps - 1)]


@pytest.mark.parametrize("is_asynchronous", [True, False])
def test_each_kind_of_step_gets_the_time_between_its_start_and_the_next(is_asynchronous: bool) -> None:
    """A ranking's prompt ran first and its two levels after it, whenever their costs are reported."""
    codes = np.unique(np.random.default_rng(0).integers(0, 100, (500, 3)), axis=0)
    items = ItemCodes(codes=codes, level_sizes=(100,) * 3, token_offsets=(1, 101, 201))
    decoder = random_decoder("tiny", torch.float32, torch.device("cpu"))
    config = EngineConfig(num_blocks=16, cpu_kernels="torch", is_asynchronous=is_asynchronous)
    engine = Engine(decoder, config, items=items, bundle_version="v1")
    engine.add_rank("a", [1, 2, 3], k=5, beam_width=8)

    outcomes, steps = drain(engine, DoublingClock())

    assert [len(outcome.item_indices) for outcome in outcomes] == [5]
    assert {kind: (one["steps"], one["seconds"]) for kind, one in steps.items()} == {
        "prefill": (1, 1.0),
        "beam": (2, 2.0 + 4.0),
    }
