"""Shapes of real size with random weights run on a GPU, and say how long they take: `python -m pytest tests/gpu -s -k large`.

Times are printed, not asserted: they are the benchmark's to hold.
"""

import time

import numpy as np
import pytest
import torch

from models.decoder.config import DecoderConfig
from models.decoder.decoder import Decoder
from services.llm.engine.beam.trie import ItemCodes
from services.llm.engine.config import EngineConfig
from services.llm.engine.engine import Engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CODES = 4_096
QWEN3_1_7B = DecoderConfig(
    vocab_size=151_936,
    hidden_size=2_048,
    intermediate_size=6_144,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=8_192,
    rms_norm_eps=1e-6,
    qk_norm=True,
)


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Qwen3-1.7B's shape over 100,000 items of three levels, warm, eight requests of 256 beams at once."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        decoder = Decoder(QWEN3_1_7B).to(torch.bfloat16).eval()
    codes = np.random.default_rng(1).integers(0, CODES, (100_000, 3))
    items = ItemCodes(codes=codes, level_sizes=(CODES,) * 3, token_offsets=(1, 1 + CODES, 1 + 2 * CODES))
    config = EngineConfig(
        num_blocks=6_000, max_num_batched_tokens=8_192, max_chunk_tokens=8_192, max_beam_rows=2_048, max_running=8
    )
    engine = Engine(decoder, config, items=items, bundle_version="v1")
    began = time.perf_counter()
    engine.warm_up()
    print(f"\nwarm in {time.perf_counter() - began:.1f} s, {torch.cuda.memory_allocated() / 2**30:.1f} GiB")  # noqa: T201 - what it is run for
    return engine


@pytest.mark.parametrize(("context", "batch"), [(1_000, 1), (1_000, 4), (1_000, 8), (5_000, 1), (5_000, 4), (5_000, 8)])
def test_large_beams(engine: Engine, context: int, batch: int) -> None:
    """Each request gets ten items, its prompt computed anew; the median time from prompts to items is told, with that of each step."""
    totals, steps = [], []
    for turn in range(7):
        for index in range(batch):
            draw = np.random.default_rng([context, batch, turn, index])  # like no other, or the cache would have it
            prompt = draw.integers(1, 3 * CODES, context).tolist()
            engine.add_rank(f"{index}", prompt, k=10, beam_width=256)
        torch.cuda.synchronize()
        began = time.perf_counter()
        ended, times = [], []
        while engine.has_work:
            start = time.perf_counter()
            ended += engine.step(0.0)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        totals.append(time.perf_counter() - began)
        steps.append(times)
        assert [len(outcome.item_indices) for outcome in ended] == [10] * batch
        assert not any(outcome.num_cached_tokens for outcome in ended)
    middle = [f"{1e3 * float(np.median(step)):.2f}" for step in zip(*steps[2:], strict=False)]
    print(f"\nbeam 256, context {context}, batch {batch}: {1e3 * float(np.median(totals[2:])):.2f} ms, steps {middle}")  # noqa: T201 - what it is run for
    assert engine.graph_counts.late_captures == engine.graph_counts.eager_fallbacks == 0


@pytest.mark.parametrize("batch", [1, 8])
def test_large_text(engine: Engine, batch: int) -> None:
    """Texts of 64 tokens; the median time of a decode step is told."""
    for index in range(batch):
        engine.add_text(f"{index}", np.random.default_rng(index).integers(1, 9_999, 128).tolist(), max_new_tokens=64)
    times = []
    while engine.has_work:
        start = time.perf_counter()
        engine.step(0.0)
        times.append(time.perf_counter() - start)
    print(f"\ndecode, batch {batch}: {1e3 * float(np.median(times[5:])):.2f} ms a step")  # noqa: T201 - what it is run for
    assert len(times) >= 64
