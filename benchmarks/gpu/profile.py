"""Time of each kind of step: attention compared with torch's, steps with the roofline, and a profile of each.

    python -m benchmarks.gpu.profile cuda OUT [--traces FOLDER] [--tiny]

Bytes and FLOPs are the minimum for the work, for steps by the cost model; GB/s and TFLOP/s are these over the measured
time, and the share is relative to the nearer of both measured limits of the GPU. Traces are for `tailrace profile`.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.engine.cases import code_table
from benchmarks.engine.shapes import SHAPES, random_decoder
from benchmarks.engine.tailrace import Clock, drain, item_codes
from benchmarks.load.command import write_report
from pipelines.profiler.record import of_engine, record
from pipelines.profiler.report import RankProfile, as_json, as_lines, profile_of
from pipelines.profiler.trace import read_traces
from services.llm.engine.config import EngineConfig
from services.llm.engine.cost.machine_limits import MachineLimits, measure_limits
from services.llm.engine.engine import Engine
from services.llm.engine.forward.attention import UniformBatch
from services.llm.engine.forward.tiles import Tile
from services.llm.engine.gpu.attention import TritonAttention
from services.llm.engine.kv.cache import KvCache

_BLOCK = 16


@dataclass(frozen=True, slots=True)
class ProfiledModel:
    """The shape of a decoder and the measured lengths."""

    shape: str
    context: int
    beams: int
    texts: int
    chunk: int
    runs: int


FULL, TINY = ProfiledModel("qwen3-1.7b", 1_000, 256, 32, 512, 20), ProfiledModel("tiny", 40, 8, 2, 16, 1)


def main() -> None:
    """Measure, write the figures, print the profiles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", choices=["cpu", "cuda"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--traces", type=Path, default=Path(".bench/gpu/work"), help="folder of the traces")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device, sizes = torch.device(options.device), TINY if options.tiny else FULL
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    limits = measure_limits(device, dtype)
    report: dict[str, Any] = {"limits": asdict(limits), "attention": attention_rows(sizes, device, dtype, limits)}
    write_report(options.out, report)
    options.traces.mkdir(parents=True, exist_ok=True)
    report["steps"], profiles = step_rows(sizes, device, dtype, limits, options.traces)
    report["profiles"] = {name: as_json([profile]) for name, profile in profiles.items()}
    write_report(options.out, report)
    for profile in profiles.values():
        print(*as_lines([profile]), sep="\n")
    for rows in (report["attention"], report["steps"]):
        for row in rows:
            print(row)


def attention_rows(
    sizes: ProfiledModel, device: torch.device, dtype: torch.dtype, limits: MachineLimits
) -> list[dict[str, Any]]:
    """Time attention of one layer, ours and torch's: a prompt's chunk, a token of each text, a request's beams."""
    shape, context = SHAPES[sizes.shape], sizes.context
    heads, groups, head_dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    blocks_each = -(-context // _BLOCK)
    cache = KvCache(shape, blocks_each * sizes.texts, _BLOCK, dtype, device)
    attention = TritonAttention(heads, groups, _BLOCK, device)
    first = context - sizes.chunk + 1
    chunk = [
        Tile(
            row,
            min(attention.max_tile_rows, sizes.chunk - row),
            first + row,
            1,
            list(range(blocks_each)),
            first + row - 1,
        )
        for row in range(0, sizes.chunk, attention.max_tile_rows)
    ]
    works = {
        "prefill": (attention.lay_out(chunk), 1, sizes.chunk),
        "decode": (attention.prepare_uniform(_batch(sizes.texts, 1, context, device)), sizes.texts, 1),
        "beam": (attention.prepare_uniform(_batch(1, sizes.beams, context, device)), 1, sizes.beams),
    }
    rows = []
    for kind, (pages, requests, rows_each) in works.items():
        q_THK = torch.randn(requests * rows_each, heads, head_dim, device=device, dtype=dtype)
        kv = torch.randn(2, requests, groups, context, head_dim, device=device, dtype=dtype)
        mask = torch.arange(context, device=device) < torch.arange(first, context + 1, device=device)[:, None]
        q = q_THK.view(requests, rows_each, heads, head_dim).transpose(1, 2)
        seconds = _seconds(lambda: attention.attend(q_THK, cache, 0, pages, None), sizes.runs, device)  # noqa: B023
        torch_s = _seconds(lambda: _torch(q, kv, mask if kind == "prefill" else None), sizes.runs, device)  # noqa: B023
        num_bytes = kv.numel() * kv.element_size() + 2 * q_THK.numel() * q_THK.element_size()
        seen = requests * (int(mask.sum()) if kind == "prefill" else rows_each * context)
        row = _row(kind, seconds, num_bytes, 4 * seen * heads * head_dim, limits)
        rows.append(row | {"torch_us": 1e6 * torch_s})
    return rows


def _batch(requests: int, rows_each: int, context: int, device: torch.device) -> UniformBatch:
    limit_R = torch.full((requests,), context, device=device)
    blocks_each = -(-context // _BLOCK)
    first_R = torch.arange(0, requests * blocks_each, blocks_each, device=device)
    blocks_N = torch.arange(requests * blocks_each, device=device)
    return UniformBatch(limit_R, limit_R, first_R, blocks_N, rows_each, max_context=context)


def _torch(q: Tensor, kv: Tensor, mask: Tensor | None) -> Tensor:
    return functional.scaled_dot_product_attention(q, kv[0], kv[1], attn_mask=mask, enable_gqa=True)


def _seconds(work: Callable[[], object], runs: int, device: torch.device) -> float:
    """Return the mean time of a run, after a run that compiles."""
    work()
    clock = Clock(device)
    clock.stamp()
    for _ in range(runs):
        work()
    clock.stamp()
    return clock.intervals()[0] / runs


def _row(kind: str, seconds: float, num_bytes: float, flops: float, limits: MachineLimits) -> dict[str, Any]:
    least_s = max(num_bytes / limits.bytes_per_s, flops / limits.flops_per_s)
    return {
        "kind": kind,
        "us": 1e6 * seconds,
        "gb_per_s": num_bytes / seconds / 1e9,
        "tflop_per_s": flops / seconds / 1e12,
        "share_of_limit": least_s / seconds,
    }


def step_rows(
    sizes: ProfiledModel, device: torch.device, dtype: torch.dtype, limits: MachineLimits, traces: Path
) -> tuple[list[dict[str, Any]], dict[str, RankProfile]]:
    """Time steps of texts and rankings, with their shares of the roofline; then record them again into folder `traces`.

    Each runs once before, to load and compile kernels.
    """
    decoder = random_decoder(sizes.shape, dtype, device)
    items = item_codes(code_table(decoder.config.vocab_size))
    blocks = 2 * sizes.texts * -(-sizes.context // _BLOCK)
    config = EngineConfig(num_blocks=blocks, max_beam_rows=sizes.beams, max_running=sizes.texts, cpu_kernels="torch")
    engine = Engine(decoder, config, items=items, bundle_version="profile")
    engine.warm_up()
    rows, profiles, draw = [], {}, np.random.default_rng(0)
    for name in ("texts", "ranking"):
        _add(engine, name, sizes, draw)
        drain(engine, Clock(device))
        _add(engine, name, sizes, draw)
        _, steps = drain(engine, Clock(device))
        for kind, spent in steps.items():
            row = _row(f"{name}: {kind}", spent["seconds"], spent["num_bytes"], spent["flops"], limits)
            rows.append(row | {"steps": spent["steps"]})
        trace = traces / f"{name}.trace.json.gz"
        record(of_engine(engine, partial(_add, engine, name, sizes)), trace, device, dtype)
        profiles[name] = profile_of(read_traces([trace])[0])
    return rows, profiles


def _add(engine: Engine, name: str, sizes: ProfiledModel, draw: np.random.Generator) -> None:
    """Add work that misses the prefix cache."""
    if name == "ranking":
        prompt = draw.integers(0, 100, sizes.context).tolist()
        engine.add_rank("ranking", prompt, k=10, beam_width=sizes.beams)
        return
    for number in range(sizes.texts):
        prompt = draw.integers(0, 100, sizes.context // 8).tolist()
        engine.add_text(f"{number}", prompt, max_new_tokens=8)


if __name__ == "__main__":
    main()
