"""Keys and values in one byte: the error of stored numbers is bounded."""

import pytest
import torch

from services.llm.engine.kv.cache import KvCache
from tests.support.engine.attention_shapes import attention_shape

CONFIG = attention_shape(4, 2, 64, layers=3)
LARGEST_ERROR = {"int8": 0.5 / 127, "fp8": 2.0**-4}
"""Relative to the head's largest number for int8 (half a step), to the number for fp8 (half of its last bit)."""


def cache_of(kind: str, dtype: torch.dtype = torch.float32) -> KvCache:
    """Build a cache of 8 blocks of 4 tokens."""
    return KvCache(CONFIG, 8, 4, dtype, torch.device("cpu"), kind)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("magnitude", [0.0, 1e-6, 1.0, 1e4])
def test_the_error_of_a_number_is_half_a_step(kind, magnitude) -> None:
    """For any magnitude, including zeros, numbers are read back within half a step of their encoding."""
    torch.manual_seed(1)
    cache, written = cache_of(kind), magnitude * torch.randn(2, 7, 2, 64)
    cache.write(1, torch.tensor([3, 0, 30, 5, 6, 7, 31]), *written)

    restored = [x.flatten(0, 1)[[3, 0, 30, 5, 6, 7, 31]] for x in cache.read(1, torch.arange(8)[None])]

    for there, back in zip(written, (restored[0].view(7, 2, 64), restored[1].view(7, 2, 64)), strict=True):
        largest = there.abs().amax(-1, keepdim=True) if kind == "int8" else there.abs()
        floor = there.abs().amax(-1, keepdim=True) * 2.0**-17  # the smallest step of fp8
        assert ((back - there).abs() <= LARGEST_ERROR[kind] * largest * 1.001 + floor).all()
