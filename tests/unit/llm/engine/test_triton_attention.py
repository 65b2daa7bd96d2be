"""The Triton kernel against the torch reference: in Triton's interpreter on a CPU, compiled where there is a CUDA device."""

import numpy as np
import pytest
import torch

from models.decoder import DecoderConfig
from services.llm.engine.attention import paged_attention
from services.llm.engine.kv_cache import KvCache
from services.llm.engine.tiles import Tile, group_tiles
from services.llm.engine.triton_attention import TritonAttention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK = 4
NUM_BLOCKS = 500


def cache_of(kind: str, kv_heads: int, head_dim: int) -> KvCache:
    """A cache whose every slot is filled with random numbers."""
    torch.manual_seed(kv_heads)
    config = DecoderConfig(
        vocab_size=2,
        hidden_size=4,
        intermediate_size=4,
        num_hidden_layers=2,
        num_attention_heads=kv_heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=8,
    )
    cache = KvCache(config, NUM_BLOCKS, BLOCK, torch.float32, DEVICE, kind)
    numbers = torch.randn(2, NUM_BLOCKS * BLOCK, kv_heads, head_dim, device=DEVICE)
    cache.write(1, torch.arange(NUM_BLOCKS * BLOCK, device=DEVICE), *numbers)
    return cache


def tiles_of(shapes: list[tuple[int, int, int]]) -> list[Tile]:
    """Tiles (rows, first limit, limit step) one after another, over pages that are shuffled and not shared."""
    blocks = np.random.default_rng(5).permutation(NUM_BLOCKS).tolist()
    tiles, row, used = [], 0, 0
    for rows, limit, step in shapes:
        need = -(-(limit + (rows - 1) * step) // BLOCK)
        tiles.append(Tile(row, rows, limit, step, blocks[used : used + need]))
        row, used = row + rows, used + need
    return tiles


PREFILL = [(1, 1, 1), (9, 1, 1), (16, 30, 1), (3, 70, 1)]
DECODE = [(1, 1, 1), (1, 77, 1), (1, 600, 1)]
BEAMS = [(16, 40, 0), (5, 3, 0), (12, 65, 0)]
MIXED = [*PREFILL[1:3], *DECODE[:2], *BEAMS]
LONG = [(7, 900, 0), (1, 530, 1)]
"""Contexts that are split over programs."""


@pytest.mark.parametrize("kind", ["model", "int8", "fp8"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 16), (6, 2, 10), (8, 1, 32)])
@pytest.mark.parametrize(
    "shapes", [PREFILL, DECODE, BEAMS, MIXED, LONG], ids=["prefill", "decode", "beams", "mixed", "long"]
)
def test_the_kernel_equals_the_reference(kind, heads, kv_heads, head_dim, shapes) -> None:
    """For MHA, GQA and MQA, each kind of cache and each kind of work, outputs and log-sum-exps agree to 1e-5."""
    cache, tiles = cache_of(kind, kv_heads, head_dim), tiles_of(shapes)
    q_THK = torch.randn(sum(rows for rows, _, _ in shapes), heads, head_dim, device=DEVICE)
    kernel = TritonAttention(heads, kv_heads, BLOCK, DEVICE)

    out_THK, lse_TH = kernel.attend(q_THK, cache, 1, kernel.lay_out(tiles))

    wanted_THK, wanted_lse_TH = paged_attention(q_THK, cache, 1, group_tiles(tiles, DEVICE), 16)
    torch.testing.assert_close(out_THK, wanted_THK, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse_TH, wanted_lse_TH, atol=1e-5, rtol=1e-5)


def test_long_contexts_are_split_and_short_ones_are_not() -> None:
    """A part is never shorter than 256 tokens, and there are no more of them than fill the device."""
    kernel = TritonAttention(4, 2, BLOCK, DEVICE)

    parts = [kernel.lay_out(tiles_of([shape])).num_parts for shape in [(1, 255, 1), (1, 512, 1), (1, 1999, 1)]]
    crowd = kernel.lay_out(tiles_of([(1, 2, 1)] * 200 + [(1, 600, 1)])).num_parts

    assert parts == [1, 2, 7]
    assert crowd == 1
