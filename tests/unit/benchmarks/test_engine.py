"""The engine benchmark: its catalogue, the peers' mask, and step times."""

import itertools

import numpy as np
import pytest
import torch

from benchmarks.engine.cases import code_table
from benchmarks.engine.catalogue import CodeTrie
from benchmarks.engine.shapes import random_decoder
from benchmarks.engine.tailrace import Clock, drain, item_codes
from services.llm.engine.config import EngineConfig
from services.llm.engine.engine import Engine

TABLE = code_table(30)
"""Ten codes per level."""


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_peer_s_beams_may_decode_the_codes_of_some_item(level: int) -> None:
    """The mask of every prefix equals a search over all items, and tokens map back to their codes."""
    trie, offsets = CodeTrie(TABLE), np.array(TABLE.token_offsets)
    prefixes = list(itertools.product(range(TABLE.level_size), repeat=level))
    tokens_BL = np.array(prefixes, dtype=np.int64).reshape(len(prefixes), level) + offsets[:level]

    allowed_BS = trie.allowed(tokens_BL)

    following = [{int(code[level]) for code in TABLE.codes if tuple(code[:level]) == prefix} for prefix in prefixes]
    assert allowed_BS.tolist() == [[code in codes for code in range(TABLE.level_size)] for codes in following]
    assert trie.codes_of((TABLE.codes[:3] + offsets).tolist()) == TABLE.codes[:3].tolist()


class DoublingClock(Clock):
    """A clock with 1, 2, 4, ... seconds between stamps, so that a sum identifies its terms."""

    num_stamps = 0

    def stamp(self) -> None:
        self.num_stamps += 1

    def intervals(self) -> list[float]:
        return [2.0**number for number in range(self.num_stamps - 1)]


@pytest.mark.parametrize("is_asynchronous", [True, False])
def test_each_kind_of_step_gets_the_time_between_its_start_and_the_next(is_asynchronous: bool) -> None:
    """The prefill gets the first interval and the two beam steps get the next two, also with an asynchronous engine."""
    decoder = random_decoder("tiny", torch.float32, torch.device("cpu"))
    items = item_codes(code_table(decoder.config.vocab_size))
    config = EngineConfig(num_blocks=16, cpu_kernels="torch", is_asynchronous=is_asynchronous)
    engine = Engine(decoder, config, items=items, bundle_version="v1")
    engine.add_rank("a", [1, 2, 3], k=5, beam_width=8)

    outcomes, steps = drain(engine, DoublingClock(torch.device("cpu")))

    assert [len(outcome.item_indices) for outcome in outcomes] == [5]
    assert {kind: (spent["steps"], spent["seconds"]) for kind, spent in steps.items()} == {
        "prefill": (1, 1.0),
        "beam": (2, 2.0 + 4.0),
    }
