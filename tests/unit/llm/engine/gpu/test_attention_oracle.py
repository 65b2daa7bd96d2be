"""The attention kernels in bf16 at production sizes against fp32 attention: interpreted on a CPU, compiled on a GPU."""

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
    """Kernels in bf16 differ from fp32 attention over the same keys and values only by bf16's rounding.

    The cases cover each kind of cache, work and split, with one to seven query heads per key/value head, and head sizes
    of 64 and 128. Tests in fp32 would not detect a wrong layout of 128 rows on tensor cores.
    """
    if case.kv_kind == "fp8" and DEVICE.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this card has no fp8")
    multiply_bf16_as_numbers()

    ours, _ = deviations(case, DEVICE)

    assert ours <= most(DEVICE)
