"""Compile the kernels of the measured shapes ahead, one process per shape, into the cache that all steps share.

    python -m benchmarks.gpu.compile cuda [--tiny]

Each engine has one layer of its shape, is warmed up, and ranks and writes once: the same kernel variants as in
measurements.
"""

import argparse
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import torch

from benchmarks.engine.cases import code_table, shape_cases
from benchmarks.engine.shapes import SHAPES, random_decoder
from benchmarks.engine.tailrace import item_codes
from services.llm.engine.config import EngineConfig
from services.llm.engine.engine import Engine

_PROMPTS = (700, 40, 1)


def main() -> None:
    """Compile, print a line per shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", choices=["cpu", "cuda"])
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    groups = shape_cases(tiny=options.tiny)
    shapes = {group.shape: dict(group.config) for group in groups}
    with ProcessPoolExecutor(len(shapes), mp_context=get_context("spawn")) as pool:
        compiling = [pool.submit(compiled, shape, config, options.device) for shape, config in shapes.items()]
        for done in as_completed(compiling):
            print(done.result(), flush=True)


def compiled(shape: str, config: dict[str, Any], device: str) -> str:
    """Warm up and use an engine of one layer; return the seconds."""
    began_s = time.monotonic()
    decoder = random_decoder(replace(SHAPES[shape], num_hidden_layers=1), torch.bfloat16, torch.device(device))
    items = item_codes(code_table(decoder.config.vocab_size))
    knobs: dict[str, Any] = {**config, "num_blocks": 512, "cpu_kernels": "torch"}
    sizes = EngineConfig(**knobs)
    engine = Engine(decoder, sizes, items=items, bundle_version="compile")
    engine.warm_up()
    for length in _PROMPTS:
        prompt = [number % 100 for number in range(min(length, engine.max_tokens // 2))]
        engine.add_rank(f"ranking {length}", prompt, k=10, beam_width=16)
        engine.add_text(f"text {length}", prompt, max_new_tokens=2)
    while engine.has_work:
        engine.step(0.0)
    return f"{shape}: {time.monotonic() - began_s:.1f} s"


if __name__ == "__main__":
    main()
