"""The attention kernels in bf16, at the sizes that are served, against attention in fp32: interpreted on a CPU, compiled on a card."""

import pytest
import torch

from tests.support.engine.attention_oracle import CASES, Case, deviations, most
from tests.support.interpreter import multiply_bf16_as_numbers

pytestmark = pytest.mark.native

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SAMPLE = {
    Case("model", "decode", "split", 7, 64),
    Case("int8", "decode", "whole", 2, 128),
    Case("fp8", "prefill", "whole", 4, 64),
    Case("model", "beams", "split", 1, 64),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=() if case in SAMPLE else pytest.mark.grid) for case in CASES]
)
def test_the_kernels_are_as_near_to_fp32_as_bf16_allows(case: Case) -> None:
    """A tensor core multiplies in bf16 what the other tests multiply in fp32: a wrong layout of 128 rows would not show there.

    Each kind of cache, of work and of splits, with one to seven query heads for each key and value head of 64 and 128 numbers: no row of a
    head differs from attention in fp32 over the same stored keys and values by more than bf16's rounding.
    """
    if case.kv_kind == "fp8" and DEVICE.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this card has no fp8")
    multiply_bf16_as_numbers()

    ours, _ = deviations(case, DEVICE)

    assert ours <= most(DEVICE)
