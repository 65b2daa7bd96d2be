"""The engine benchmark: its catalogue, the peers' mask, step times, and the imports of its process."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch

import benchmarks.engine.tailrace
from benchmarks.engine.cases import code_table
from benchmarks.engine.catalogue import CodeTrie
from benchmarks.engine.shapes import random_decoder
from benchmarks.engine.tailrace import Clock, TailraceEngine, drain, item_codes
from services.llm.engine.config import EngineConfig
from services.llm.engine.engine import Engine

BARE = {"ray", "rich", "typer", "transformers", "prometheus_client", "pydantic", "pyarrow", "fastapi", "psutil"}
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
    assert allowed_BS.tolist() == [[code in found for code in range(TABLE.level_size)] for found in following]
    assert trie.codes_of((TABLE.codes[:3] + offsets).tolist()) == TABLE.codes[:3].tolist()


def test_the_benchmark_imports_little() -> None:
    """The command and our engine's process import only torch, numpy, safetensors, tokenizers and their dependencies."""
    script = (
        "import sys, benchmarks.engine, benchmarks.engine.tailrace; "
        f"sys.exit(', '.join({BARE!r} & set(sys.modules)) or 0)"
    )

    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


def test_a_case_that_fails_leaves_no_request_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed case the engine is empty and ranks as before."""
    config = {"num_blocks": 16, "cpu_kernels": "torch", "max_running": 1, "max_waiting": 2}
    engine = TailraceEngine(
        {"model": "shape:tiny", "device": "cpu", "dtype": "float32", "threads": 1, "config": config}
    )
    ask = {"do": "rank", "prompts": [[1, 2, 3], [4, 5, 6]], "width": 8, "num_best": 5}
    outputs = engine.answer(ask)["outputs"]
    with monkeypatch.context() as patch:
        patch.setattr(benchmarks.engine.tailrace, "drain", drain_that_fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.answer(ask)

    assert engine.answer(ask)["outputs"] == outputs


def drain_that_fails(engine: Engine, _clock: object) -> None:
    """Run one step, then fail."""
    engine.step(0.0)
    raise RuntimeError("out of memory")


class DoublingClock(Clock):
    """A clock with 1, 2, 4, ... seconds between stamps, so that a sum identifies its terms."""

    num_stamps = 0

    def stamp(self) -> None:
        self.num_stamps += 1

    def intervals(self) -> list[float]:
        return [2.0**place for place in range(self.num_stamps - 1)]


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
    assert {kind: (one["steps"], one["seconds"]) for kind, one in steps.items()} == {
        "prefill": (1, 1.0),
        "beam": (2, 2.0 + 4.0),
    }
