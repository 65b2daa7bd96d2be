"""The Triton kernel against the torch reference: in Triton's interpreter on a CPU, compiled on a CUDA device."""

import itertools

import numpy as np
import pytest
import torch

from models.decoder.window import Window
from services.llm.engine.forward.attention import UniformBatch
from services.llm.engine.forward.tiles import Tile, group_tiles
from services.llm.engine.forward.torch_attention import TorchAttention, paged_attention
from services.llm.engine.gpu.attention import TritonAttention
from services.llm.engine.gpu.token_graphs import PromptTable
from services.llm.engine.kv.cache import KvCache
from tests.support.engine.attention_shapes import attention_shape
from tests.support.training.sequences import step_of, tails_of

pytestmark = pytest.mark.native

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK = 4
NUM_BLOCKS = 600
POOL = {"block_tokens": BLOCK, "num_blocks": NUM_BLOCKS}


def cache_of(kind: str, kv_heads: int, head_dim: int) -> KvCache:
    """Build a cache with random numbers in every slot."""
    torch.manual_seed(kv_heads)
    config = attention_shape(kv_heads, kv_heads, head_dim)
    cache = KvCache(config, NUM_BLOCKS, BLOCK, torch.float32, DEVICE, kind)
    numbers = torch.randn(2, NUM_BLOCKS * BLOCK, kv_heads, head_dim, device=DEVICE)
    cache.write(1, torch.arange(NUM_BLOCKS * BLOCK, device=DEVICE), *numbers)
    return cache


def tiles_of(shapes: list[tuple[int, int, int]]) -> list[Tile]:
    """Build consecutive tiles (rows, first limit, limit step) over shuffled, unshared pages."""
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
LONG = [(7, 300, 0), (1, 270, 1)]
"""Contexts of several splits."""
LONGEST = [(1, 2_300, 1)]
"""A context with more splits than are merged at once."""


HEADS = {"mha": (4, 4, 16), "gqa": (6, 2, 10), "mqa": (8, 1, 32)}
WORK = {"prefill": PREFILL, "decode": DECODE, "beams": BEAMS, "mixed": MIXED, "long": LONG, "longest": LONGEST}
SAMPLE = {("model", "gqa", "mixed"), ("model", "mha", "longest"), ("int8", "mha", "mixed"), ("fp8", "mqa", "long")}
CASES = [
    pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.grid)
    for case in itertools.product(("model", "int8", "fp8"), HEADS, WORK)
]


@pytest.mark.parametrize(("kind", "shape", "work"), CASES)
def test_the_kernel_equals_the_reference(kind: str, shape: str, work: str) -> None:
    """For MHA, GQA and MQA, each kind of cache and each kind of work, outputs agree to 1e-5."""
    (heads, kv_heads, head_dim), shapes = HEADS[shape], WORK[work]
    cache, tiles = cache_of(kind, kv_heads, head_dim), tiles_of(shapes)
    q_THK = torch.randn(sum(rows for rows, _, _ in shapes), heads, head_dim, device=DEVICE)
    kernel = TritonAttention(heads, kv_heads, BLOCK, DEVICE)

    out_THK = kernel.attend(q_THK, cache, 1, kernel.lay_out(tiles), None)

    wanted_THK, _ = paged_attention(q_THK, cache, 1, group_tiles(tiles, DEVICE), 16)
    torch.testing.assert_close(out_THK, wanted_THK, atol=1e-5, rtol=1e-5)


WINDOWS = [None, Window(4, frozenset({1})), Window(70, frozenset({1}), 3), Window(5, frozenset({1}), 130)]
STEPS = {
    "prefill": ([(0, 9), (140, 12)], []),
    "all": ([(0, 5), (270, 1)], [(65, 6, 1), (3, 2, 3), (150, 3, 2)]),
}


def assert_as_the_reference(heads, kv_heads, head_dim, num_rows, window, prepare, tails=None) -> None:
    """Assert that kernel and torch outputs agree to 1e-5, each with its own input from `prepare`."""
    cache, q_THK = cache_of("model", kv_heads, head_dim), torch.randn(num_rows, heads, head_dim, device=DEVICE)
    kernel = TritonAttention(heads, kv_heads, BLOCK, DEVICE, window)
    reference = TorchAttention(16, 32, BLOCK, DEVICE, window)

    out_THK, wanted_THK = (backend.attend(q_THK, cache, 1, prepare(backend), tails) for backend in (kernel, reference))

    torch.testing.assert_close(out_THK, wanted_THK, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", WINDOWS, ids=["full", "narrow", "sinks", "many sinks"])
@pytest.mark.parametrize("name", STEPS)
def test_steps_with_tails_and_windows_equal_the_reference(name, window) -> None:
    """A step's chunks and beams with tails agree to 1e-5 in layers with and without windows and sinks."""
    plan = step_of(*STEPS[name], **POOL)
    num_rows = plan.num_batched_tokens + sum(sequence.num_beam_rows for sequence in plan.beam_steps)

    assert_as_the_reference(
        6, 2, 10, num_rows, window, lambda backend: backend.prepare(plan), tails_of(plan, 2, 2, 10, DEVICE)
    )


@pytest.mark.parametrize("window", [WINDOWS[0], pytest.param(WINDOWS[1], marks=pytest.mark.grid), WINDOWS[2]])
@pytest.mark.parametrize("rows_per_request", [1, pytest.param(5, marks=pytest.mark.grid), 70])
def test_steps_of_one_shape_equal_the_reference(window, rows_per_request) -> None:
    """Text decode, and beams in one or several tiles, laid out on the device, agree to 1e-5."""
    blocks = torch.from_numpy(np.random.default_rng(5).permutation(NUM_BLOCKS)).to(DEVICE)
    limit_R, first_R = (torch.tensor(numbers, device=DEVICE) for numbers in ([37, 1, 201], [40, 3, 120]))
    rows = UniformBatch(limit_R, limit_R, first_R, blocks, rows_per_request, max_context=240)

    assert_as_the_reference(4, 2, 16, 3 * rows_per_request, window, lambda backend: backend.prepare_uniform(rows))


@pytest.mark.parametrize("window", [WINDOWS[0], pytest.param(WINDOWS[2], marks=pytest.mark.grid)])
def test_recorded_prompts_equal_the_reference(window) -> None:
    """Prompts in a fixed-size tile table with mostly unused tiles agree to 1e-5 with both kernels."""
    heads, kv_heads, head_dim, rows = 6, 2, 10, 64
    cache, plan = cache_of("model", kv_heads, head_dim), step_of([(0, 9), (140, 30), (300, 1)], [], **POOL)
    kernel = TritonAttention(heads, kv_heads, BLOCK, DEVICE, window)
    reference = TorchAttention(16, 32, BLOCK, DEVICE, window)
    q_THK = torch.randn(rows, heads, head_dim, device=DEVICE)
    wanted_THK = reference.attend(q_THK[:40], cache, 1, reference.prepare(plan), None)

    for attention in (kernel, reference):
        table = PromptTable(rows, 400, BLOCK, NUM_BLOCKS - 1, attention.max_tile_rows, DEVICE)
        table.fill(plan.chunks, rows)
        out_THK = attention.attend(q_THK, cache, 1, attention.prepare_tiles(table.tiles(rows)), None)

        torch.testing.assert_close(out_THK[:40], wanted_THK, atol=1e-5, rtol=1e-5)
        assert out_THK.isfinite().all()


def test_long_contexts_are_split_and_short_ones_are_not() -> None:
    """A split has at least 128 tokens, and splits do not exceed the programs that run at once."""
    kernel = TritonAttention(4, 2, BLOCK, DEVICE)

    splits = [kernel.lay_out(tiles_of([(1, limit, 1)])).num_splits for limit in (127, 256, 1999)]
    tall = [(1, 200), (1, 39), (64, 39)]
    of_many = [[(rows, 2, 0)] * others + [(rows, 600, 0)] for rows, others in tall]
    splits_with_others = [kernel.lay_out(tiles_of(shapes)).num_splits for shapes in of_many]

    assert splits == [1, 2, 15]
    assert splits_with_others == [1, 3, 1]


def test_the_longest_contexts_are_started_first() -> None:
    """Longer contexts come first for any input order, and each tile keeps its rows."""
    kernel = TritonAttention(4, 2, BLOCK, DEVICE)

    rows = kernel.lay_out(tiles_of([(9, 1, 1), (1, 77, 1), (5, 40, 0)])).tile_E6[:, :3]

    assert rows.tolist() == [[9, 1, 77], [10, 5, 40], [0, 9, 1]]
