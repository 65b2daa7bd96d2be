"""Attention over pages and tails against dense attention over the same keys, for any tiling."""

from itertools import pairwise, product

import numpy as np
import pytest
import torch
from torch.nn import functional

from models.decoder.window import Window
from services.llm.engine.forward.tiles import Tile, cut_tiles, group_tiles
from services.llm.engine.forward.torch_attention import merge_states, paged_attention, tail_attention
from services.llm.engine.kv.cache import KvCache
from services.llm.engine.plan import Chunk, StepPlan
from tests.support.engine.attention_shapes import attention_shape
from tests.support.engine.dense import seen_by_rows
from tests.support.training.sequences import sequence_of

BLOCK = 4
CPU = torch.device("cpu")


def build_context(length: int, heads: int, kv_heads: int, seed: int):
    """Build a cache with shuffled block ids, filled with a single context."""
    torch.manual_seed(seed)
    config = attention_shape(heads, kv_heads, 8)
    cache = KvCache(config, 64, BLOCK, torch.float32, CPU)
    blocks = np.random.default_rng(seed).permutation(64)[: -(-length // BLOCK)]
    positions = np.arange(length)
    slots = torch.from_numpy(blocks[positions // BLOCK] * BLOCK + positions % BLOCK)
    keys, values = torch.randn(2, length, kv_heads, 8)
    cache.write(1, slots, keys, values)
    return cache, blocks.tolist(), keys, values


def dense(q, keys, values, seen):
    """Attend densely: (T, H, K) queries, (C, G, K) keys, (T, C) bool."""
    q, keys, values = (x.transpose(0, 1)[None] for x in (q, keys, values))
    out = functional.scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=True)
    return out[0].transpose(0, 1)


SAMPLE = {(None, 0), (1, 1), (5, 0), (5, 4), (16, 7), (500, 4)}
WINDOWS = [
    pytest.param(
        None if size is None else Window(size, frozenset({1}), num_sinks),
        id=f"{size}-{num_sinks}",
        marks=() if (size, num_sinks) in SAMPLE else pytest.mark.grid,
    )
    for size, num_sinks in [(None, 0), *product((1, 5, 16, 500), (0, 1, 4, 7))]
]


@pytest.mark.parametrize("kv_heads", [1, 2, pytest.param(6, marks=pytest.mark.grid)])
@pytest.mark.parametrize("tile_tokens", [4, pytest.param(12, marks=pytest.mark.grid), 512])
@pytest.mark.parametrize("window", WINDOWS)
def test_chunks_see_what_dense_attention_sees(kv_heads, tile_tokens, window) -> None:
    """Rows of chunks attend to their past and themselves; with a window, to its positions and the sinks."""
    cache, blocks, keys, values = build_context(90, 6, kv_heads, seed=kv_heads)
    q = torch.randn(90, 6, 8)
    wanted = dense(q, keys, values, seen_by_rows(90, window))

    for start, end in pairwise([0, 1, 37, 67, 68, 90]):
        plan = StepPlan(chunks=[Chunk(sequence_of(90, blocks), start, end - start)])
        groups = group_tiles(cut_tiles(plan, 10, BLOCK, window), CPU)
        out, _ = paged_attention(q[start:end], cache, 1, groups, tile_tokens)

        torch.testing.assert_close(out, wanted[start:end], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, Window(5, frozenset({1}), num_sinks=1)])
def test_stale_contents_of_a_block_are_not_read(window) -> None:
    """NaN beyond a context's end or before its window does not change the result."""
    cache, blocks, _, _ = build_context(26, 4, 2, seed=1)
    spoiled, _, _, _ = build_context(26, 4, 2, seed=1)
    unused = [slot for block in range(64) for slot in range(block * BLOCK, block * BLOCK + BLOCK)]
    unused = sorted({*unused} - {blocks[position // BLOCK] * BLOCK + position % BLOCK for position in range(26)})
    spoiled.write(1, torch.tensor(unused), *torch.full((2, len(unused), 2, 8), torch.nan))
    plan = StepPlan(chunks=[Chunk(sequence_of(26, blocks), 0, 26)])
    q = torch.randn(26, 4, 8)

    wanted, attended = (
        paged_attention(q, memory, 1, group_tiles(cut_tiles(plan, 10, BLOCK, window), CPU), 8)[0]
        for memory in (cache, spoiled)
    )

    torch.testing.assert_close(attended, wanted, atol=0, rtol=0)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_beams_see_the_shared_context_and_their_own_tail(kv_heads) -> None:
    """Paged attention merged with tail attention equals dense attention over context and tail together."""
    cache, blocks, keys, values = build_context(23, 4, kv_heads, seed=2)
    q, tail_keys, tail_values = torch.randn(5, 4, 8), torch.randn(5, 3, kv_heads, 8), torch.randn(5, 3, kv_heads, 8)
    seen = torch.arange(3) <= torch.tensor([0, 1, 2, 1, 0])[:, None]

    paged, paged_lse = paged_attention(q, cache, 1, group_tiles([Tile(0, 5, 23, 0, blocks)], CPU), 8)
    out = merge_states(paged, paged_lse, *tail_attention(q, tail_keys, tail_values, seen))

    for beam in range(5):
        own = seen[beam]
        all_keys = torch.cat((keys, tail_keys[beam][own]))
        all_values = torch.cat((values, tail_values[beam][own]))
        wanted = dense(q[beam : beam + 1], all_keys, all_values, torch.ones(1, len(all_keys), dtype=torch.bool))
        torch.testing.assert_close(out[beam : beam + 1], wanted, atol=1e-5, rtol=1e-5)


def test_no_score_matrix_exceeds_a_tile(monkeypatch) -> None:
    """Scores exist only for a tile of queries by a tile of context, for any context length."""
    cache, blocks, _, _ = build_context(200, 4, 2, seed=4)
    q = torch.randn(16, 4, 8)
    sizes = []
    original = torch.Tensor.exp_
    monkeypatch.setattr(torch.Tensor, "exp_", lambda x: (sizes.append(x.numel()), original(x))[1])

    paged_attention(q, cache, 1, group_tiles([Tile(0, 16, 185, 1, blocks)], CPU), 16)

    assert max(sizes) == 16 * 4 * 16


@pytest.mark.parametrize(("size", "num_sinks", "blocks_read"), [(8, 0, 3), (8, 4, 4), (8, 5, 5), (500, 4, 25)])
def test_blocks_that_no_row_sees_are_not_read(size, num_sinks, blocks_read) -> None:
    """A tile over a long context contains only the blocks of the sinks and of the window."""
    sequence = sequence_of(98, list(range(25)))
    plan = StepPlan(chunks=[Chunk(sequence, 97, 1)])

    [tile] = cut_tiles(plan, 10, BLOCK, Window(size, frozenset({0}), num_sinks))

    assert len(tile.block_ids) == blocks_read
    assert tile.block_ids[-1] == 24
