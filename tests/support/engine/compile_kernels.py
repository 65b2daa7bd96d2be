"""Compile every Triton kernel for a Hopper GPU without having one, through the engine's own calls.

Run: `python -m tests.support.engine.compile_kernels`. The interpreter accepts kernels that do not compile. Prints one
line per compiled kernel, and fails if a kernel does not compile or needs more shared memory than a Hopper has.
"""

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from models.decoder.window import Window
from services.llm.engine.beam.tails import Tails
from services.llm.engine.forward.attention import TileBatch, UniformBatch
from services.llm.engine.forward.tiles import Tile
from services.llm.engine.forward.weights import HeadNorms
from services.llm.engine.gpu.attention import TritonAttention
from services.llm.engine.gpu.forward import TritonOps
from services.llm.engine.kv.cache import KvCache
from tests.support.engine.attention_shapes import attention_shape

HEADS, GROUPS, HEAD_DIM, HIDDEN, BLOCK = 16, 8, 128, 2_048, 16
SHARED_BYTES = 227 * 1024


class Hopper:
    """The part of a Triton driver that the compiler calls."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int | None = None) -> int:
        return 0


def compile_instead(kernel, grid):
    """Replace `kernel[grid]`: compile for the arguments without launching."""

    def call(*args, **kwargs) -> None:
        compiled = kernel.run(*args, grid=grid, warmup=True, **kwargs)
        shared = compiled.metadata.shared
        assert shared <= SHARED_BYTES, f"{kernel.fn.__name__}: {shared} bytes of shared memory"
        print(kernel.fn.__name__, len(compiled.asm["cubin"]), shared)  # noqa: T201 - what it is run for

    return call


def compile_layers(kind: str, dtype: torch.dtype) -> None:
    """Compile the operations of a layer besides attention."""
    kernels, cache = TritonOps(), cache_of(kind, dtype)
    x_TD, weight_D = torch.zeros(3, HIDDEN, dtype=dtype), torch.zeros(HIDDEN, dtype=dtype)
    kernels.rms_norm(x_TD, weight_D, 1e-6)
    kernels.add_rms_norm(x_TD, x_TD, weight_D, 1e-6)
    kernels.silu_mul(torch.zeros(3, 2 * HIDDEN, dtype=dtype))
    cos_sin, one_P = (torch.zeros(3, HEAD_DIM, dtype=dtype),) * 2, torch.zeros(1, dtype=torch.int64)
    tail = torch.zeros(1, 2, 2, GROUPS, HEAD_DIM, dtype=dtype)
    tails = Tails(tail, tail, one_P.expand(2), torch.ones(2, 2).bool())
    for norms in (None, HeadNorms(weight_D[:HEAD_DIM], weight_D[:HEAD_DIM])):
        qkv_TX = torch.zeros(3, (HEADS + 2 * GROUPS) * HEAD_DIM, dtype=dtype)
        kernels.rope_and_store(qkv_TX, cos_sin, norms, 1e-6, cache, 0, one_P, tails)


def compile_attention(kind: str, dtype: torch.dtype, window: Window | None = None) -> None:
    """Compile attention of a text token, of whole and split prefill tiles, and of captured beams and prompts."""
    attention = TritonAttention(HEADS, GROUPS, BLOCK, torch.device("cpu"), window)
    cache = cache_of(kind, dtype)
    for rows, limit in ((1, 40), (1, 400), (40, 40), (40, 400)):
        q_THK = torch.zeros(rows, HEADS, HEAD_DIM, dtype=dtype)
        attention.attend(q_THK, cache, 0, attention.lay_out([Tile(0, rows, limit, 1, [0] * 30)]), None)
    one_R, blocks_N = torch.ones(1, dtype=torch.int64), torch.zeros(9, dtype=torch.int64)
    tails = Tails(
        *(torch.zeros(1, 64, 2, GROUPS, HEAD_DIM, dtype=dtype),) * 2, blocks_N[:1].expand(64), torch.ones(64, 2).bool()
    )
    pages = attention.prepare_uniform(UniformBatch(one_R, one_R, one_R, blocks_N, 64, max_context=5_000))
    attention.attend(torch.zeros(64, HEADS, HEAD_DIM, dtype=dtype), cache, 0, pages, tails)
    for rows in (16, 512):
        tiles_E6, height = torch.zeros(12, 6, dtype=torch.int64), min(rows, attention.max_tile_rows)
        pages = attention.prepare_tiles(TileBatch(tiles_E6, blocks_N, height, max_context=5_000))
        attention.attend(torch.zeros(rows, HEADS, HEAD_DIM, dtype=dtype), cache, 0, pages, None)


def cache_of(kind: str, dtype: torch.dtype) -> KvCache:
    """Build a small cache of one layer."""
    config = attention_shape(HEADS, GROUPS, HEAD_DIM, layers=1)
    return KvCache(config, 10, BLOCK, dtype, torch.device("cpu"), kind)


if __name__ == "__main__":
    driver.set_active(Hopper())
    JITFunction.__getitem__ = compile_instead
    compile_layers("model", torch.bfloat16)
    compile_attention("model", torch.bfloat16)
    compile_attention("model", torch.bfloat16, Window(64, frozenset({0}), 4))
    for kind in ("int8", "fp8"):
        compile_layers(kind, torch.bfloat16)
        compile_attention(kind, torch.bfloat16)
