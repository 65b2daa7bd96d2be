"""Keys and values in one byte: the error is bounded, rankings hardly change, and batches do not change results."""

import numpy as np
import pytest
import torch

from services.llm.engine.kv.cache import KvCache
from tests.support.attention_shapes import attention_shape
from tests.unit.llm.engine.conftest import build_decoder, build_engine, build_items, drain

CONFIG = attention_shape(4, 2, 64, layers=3)
LARGEST_ERROR = {"int8": 0.5 / 127, "fp8": 2.0**-4}
"""Of a head's largest number for int8 (half a step), of the number itself for fp8 (half of its last of three bits)."""


def cache_of(kind: str, dtype: torch.dtype = torch.float32) -> KvCache:
    """A cache of 8 blocks of 4 tokens."""
    return KvCache(CONFIG, 8, 4, dtype, torch.device("cpu"), kind)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("magnitude", [0.0, 1e-6, 1.0, 1e4])
def test_the_error_of_a_number_is_half_a_step(kind, magnitude) -> None:
    """Whatever the magnitude, zeros included, each number is read back within half a step of its code."""
    torch.manual_seed(1)
    cache, written = cache_of(kind), magnitude * torch.randn(2, 7, 2, 64)
    cache.write(1, torch.tensor([3, 0, 30, 5, 6, 7, 31]), *written)

    found = [x.flatten(0, 1)[[3, 0, 30, 5, 6, 7, 31]] for x in cache.read(1, torch.arange(8)[None])]

    for there, back in zip(written, (found[0].view(7, 2, 64), found[1].view(7, 2, 64)), strict=True):
        largest = there.abs().amax(-1, keepdim=True) if kind == "int8" else there.abs()
        floor = there.abs().amax(-1, keepdim=True) * 2.0**-17  # fp8 has a smallest step of its own
        assert ((back - there).abs() <= LARGEST_ERROR[kind] * largest * 1.001 + floor).all()


@pytest.mark.parametrize(("kind", "overlap"), [("int8", 0.95), ("fp8", 0.8)])
def test_rankings_hardly_change(kind, overlap) -> None:
    """Most of the ten best items of a random model are also the ten best with exact keys and values."""
    items = build_items(3)
    decoder, allowed = build_decoder(items), np.ones(50, dtype=bool)
    found = {}
    for one in ("model", kind):
        engine = build_engine(decoder, items, kv_kind=one)
        for index in range(20):
            prompt = [0, *np.random.default_rng(index).integers(1, 18, 40).tolist()]
            engine.add_rank(str(index), prompt, k=10, allowed=allowed, beam_width=50)
        found[one] = drain(engine)

    shared = [
        len(set(found["model"][name].item_indices) & set(found[kind][name].item_indices)) / 10 for name in found[kind]
    ]
    assert np.mean(shared) >= overlap
