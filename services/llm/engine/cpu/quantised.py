"""Matrices in int8: whole numbers with one scale for each row, so that half of bf16's bytes are read and VNNI multiplies them.

Symmetric, to the nearest of -127 to 127 by the row's largest magnitude. Rows are padded with zeros to whole vectors. Activations are
quantised as they come, row by row (the library does that).

Shape suffixes: N and I out and in of a matrix, J = I rounded up to a multiple of 64.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

_VECTOR = 64


@dataclass(frozen=True, slots=True, eq=False)
class Int8Matrix:
    """weight = code * scale of its row; `sum_N` is each row's sum of codes, by which the bytes' offset is taken back."""

    code_NJ: Tensor
    scale_N: Tensor
    sum_N: Tensor


def quantise(weight_NI: Tensor) -> Int8Matrix:
    """Round a matrix to int8."""
    scale_N = (weight_NI.float().abs().amax(1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    code_NI = (weight_NI.float() / scale_N.unsqueeze(1)).round().to(torch.int8)
    code_NJ = functional.pad(code_NI, (0, -code_NI.shape[1] % _VECTOR)).contiguous()
    return Int8Matrix(code_NJ, scale_N.contiguous(), code_NJ.sum(1, dtype=torch.int32))
