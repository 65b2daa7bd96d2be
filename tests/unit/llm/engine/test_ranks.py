"""Tensor parallelism over gloo ranks: the outcomes of one rank, the bytes that the planner counts, and lost ranks."""

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from models.decoder.decoder import Decoder
from models.decoder.weights import save_decoder
from pipelines.planner.serving import all_reduce_bytes
from services.errors import ConfigError, DependencyUnavailable
from services.llm.engine.config import EngineConfig
from services.llm.engine.engine import Engine
from services.llm.engine.ranks import LeadRank, check_layout, load_part, shard_of, start_ranks
from services.llm.serving.engine_thread import EngineThread
from tests.support.engine.attention_shapes import attention_shape
from tests.support.engine.dense import hidden_of
from tests.support.engine.engine_scripts import LIMITS, Play, World, assert_as_alone
from tests.support.engine.engines import build_decoder, build_items

TIMEOUT_S = 60.0
SCRIPT = [
    ("text", 0, 12),
    ("rank", 4, 9),
    ("masked", 3, 8),
    ("step", 2, 0),
    ("choices", 5, 6),
    ("rank", 7, 20),
    ("cancel", 1, 0),
    ("late rank", 9, 3),
    ("text", 2, 12),
    ("step", 3, 0),
    ("rank", 11, 5),
    ("late text", 6, 4),
    ("text", 4, 12),
]
"""Texts with all samplings, rankings, a cancelled and two late requests, more than run at once."""


def engine_over(folder: Path, depth: int, num_ranks: int, **knobs: int) -> tuple[Engine, LeadRank | None]:
    """Build an engine over this many ranks of a world's decoder."""
    limits = LIMITS | {"num_blocks": 20, "tensor_parallel_size": num_ranks, "rank_timeout_s": TIMEOUT_S} | knobs
    config = EngineConfig(block_tokens=4, tile_tokens=64, cpu_kernels="torch", **limits)
    items = build_items(depth)
    save_decoder(build_decoder(items), folder)
    part, config = load_part(folder, torch.float32, "cpu", config)
    ranks = start_ranks(folder, torch.float32, "cpu", config, items)
    return Engine(part, config, items=items, bundle_version="v1", ranks=ranks), ranks


@pytest.fixture
def two_ranks(tmp_path: Path) -> Iterator[tuple[Engine, LeadRank]]:
    """An engine over two ranks that wait five seconds for each other."""
    engine, ranks = engine_over(tmp_path, 2, 2, rank_timeout_s=5)
    assert ranks is not None
    yield engine, ranks
    engine.close()


@pytest.mark.parametrize(("depth", "num_ranks", "num_drafts"), [(3, 2, 0), (2, 4, 3)])
def test_ranks_have_the_outcomes_of_one(tmp_path: Path, depth: int, num_ranks: int, num_drafts: int) -> None:
    """Rankings and texts, preempted, cancelled and late, equal one rank's results; four ranks replicate key heads."""
    engine, ranks = engine_over(tmp_path, depth, num_ranks, num_speculative_tokens=num_drafts)

    play = Play(World(depth), engine).run(SCRIPT)

    assert_as_alone(play)
    engine.close()
    assert ranks is not None
    assert [process.poll() is not None for process in ranks.processes] == [True] * (num_ranks - 1)


def test_one_rank_needs_no_follower() -> None:
    """A group of one rank starts no process, sends nothing and has the same outcomes."""
    config = EngineConfig(block_tokens=4, tile_tokens=64, cpu_kernels="torch", **LIMITS)
    items = build_items(2)
    ranks = LeadRank(Path(), torch.float32, "cpu", config, items)
    engine = Engine(build_decoder(items), config, items=items, bundle_version="v1", ranks=ranks)

    assert_as_alone(Play(World(2), engine).run(SCRIPT))
    assert (ranks.processes, ranks.bytes_sent) == ([], 0.0)
    engine.close()


def test_the_bytes_sent_equal_the_planners_count(two_ranks: tuple[Engine, LeadRank]) -> None:
    """Two all-reduces a layer of every row; in the last layer of the rows that are read: the beams' and ten others."""
    engine, ranks = two_ranks
    play = Play(World(2), engine).run([("text", 0, 8), ("rank", 4, 9), ("rank", 5, 3)])

    rows = sum(size.num_rows for size in play.sizes)
    read = sum(size.num_beam_rows for size in play.sizes) + 8 + 2
    counted = (
        all_reduce_bytes(count, hidden_size=32, num_layers=1, shards=2, number_bytes=4) for count in (rows, read)
    )
    assert ranks.bytes_sent == sum(counted)


@pytest.mark.parametrize("loss", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_rank_fails_its_replica(two_ranks: tuple[Engine, LeadRank], loss: signal.Signals) -> None:
    """A killed rank fails the request at once, a hanging rank within its timeout; then health checks fail."""
    engine, ranks = two_ranks
    thread = EngineThread(engine, 1, lambda stepped: None)

    def add(engine: Engine, request_id: str, now_s: float) -> None:
        engine.add_text(request_id, [1, 2, 3], max_new_tokens=20)

    await asyncio.wait_for(thread.run_request(add), 60)
    os.kill(ranks.processes[0].pid, loss)

    with pytest.raises(DependencyUnavailable):
        await asyncio.wait_for(thread.run_request(add), 60)
    thread.join(10)
    with pytest.raises(RuntimeError, match="the engine thread died"):
        thread.check_health(10.0)
    assert ranks.processes[0].poll() is not None


def test_a_replaced_group_answers(tmp_path: Path) -> None:
    """After a group has failed, a new group of the same folder has the same outcomes."""
    for _ in range(2):
        engine, _ranks = engine_over(tmp_path, 1, 2)
        assert_as_alone(Play(World(1), engine).run([("text", 0, 6), ("rank", 3, 4)]))
        engine.close()


def test_shards_add_up_to_the_decoder() -> None:
    """With biases and untied tables, the parts of the first layer's outputs sum to the whole layer's output."""
    torch.manual_seed(0)
    config = attention_shape(
        8, 2, 4, vocab_size=9, hidden_size=16, intermediate_size=24, qkv_bias=True, output_bias=True, mlp_bias=True
    )
    whole = Decoder(replace(config, tie_word_embeddings=False, num_hidden_layers=1)).eval()
    x_TD = torch.randn(5, 16)
    for num_ranks in (1, 2, 4, 8):
        parts = [shard_of(whole, rank, num_ranks) for rank in range(num_ranks)]

        fed = [part.layers[0]._feed_forward(x_TD) for part in parts]
        torch.testing.assert_close(sum(fed), whole.layers[0]._feed_forward(x_TD))
        heads = torch.cat([part.layers[0]["q"](x_TD) for part in parts], dim=-1)
        torch.testing.assert_close(heads, whole.layers[0]["q"](x_TD))
    tokens = torch.arange(5)
    assert np.array_equal(hidden_of(shard_of(whole, 0, 1), tokens).detach(), hidden_of(whole, tokens).detach())


def test_head_counts_that_do_not_divide_are_refused() -> None:
    """The error names the sizes and the numbers of ranks that are possible."""
    config = attention_shape(9, 3, 8, intermediate_size=48)

    with pytest.raises(ConfigError) as refused:
        check_layout(config, 2)

    assert str(refused.value) == (
        "tensor_parallel_size: 2 does not divide 9 query heads, 3 key heads and 48 feed-forward numbers; "
        "set it to 1 or 3"
    )


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    """Only weights in the model's dtype are divided."""
    with pytest.raises(ConfigError, match="weight_kind: int8 runs on one rank; set it to model"):
        load_part(tmp_path, torch.float32, "cpu", EngineConfig(tensor_parallel_size=2, weight_kind="int8"))
