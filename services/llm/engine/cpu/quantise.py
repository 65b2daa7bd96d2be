"""Weights in 8 and in 4 bits, as the compiled library multiplies them: stored codes, and the numbers they represent.

With 8 bits a weight is its code times the scale of its row. With 4 bits it is code * multiplier * scale: codes of -7 to
7 in groups of 32 along the input, an integer multiplier of 1 to 18 per group, and a scale per row. Code times
multiplier fits int8, so the library unpacks by a lookup and then multiplies as with int8 (`int4.h`). A multiplier takes
a byte, so a weight takes 4.25 bits. Rounding is a pure function of the weights: trainings and tests call `rounded` and
get the engine's numbers.

Shape suffixes: N and I out and in of a matrix, J = I rounded up to a multiple of 64, G groups of a row, K weights of a
group, P = J / 2.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from models.decoder.config import DecoderConfig
from services.errors import ConfigError
from services.llm.engine.config import MATRIX_BITS, WeightKind

GROUP = 32
_VECTOR = 64
_MAX_CODE, _MAX_MULTIPLIER = 7, 18
_TRIED = 3
"""Multipliers tried per group, from the smallest that clips nothing downwards; the least squared error wins."""
_MAX_INPUTS = (2**31 - 1) // (255 * 127)
"""Maximum number of products of an unsigned and a signed byte whose sum is certain to fit 32 bits."""


class QuantisedRows(NamedTuple):
    """A matrix in 8 or 4 bits, each row padded with zeros to whole vectors.

    `codes` are (N, J) int8, or (N, P) uint8 with two codes each, plus 8: in blocks of 64 weights, the low halves hold
    the first group and the high halves the second. `scale_N` is fp32. `sum_N` (int32) are the rows' sums of int8
    numbers; the library corrects the offset of its unsigned activations with them. `multiplier_NG` (uint8) is None for
    8 bits.
    """

    codes: Tensor
    scale_N: Tensor
    sum_N: Tensor
    multiplier_NG: Tensor | None = None


def quantise(weight_NI: Tensor, bits: int) -> QuantisedRows:
    """Quantise a matrix to 8 or 4 bits, rounding to nearest."""
    if bits == 8:
        code_NI, scale_N = _int8(weight_NI)
        code_NJ = functional.pad(code_NI, (0, -code_NI.shape[1] % _VECTOR)).to(torch.int8).contiguous()
        return QuantisedRows(code_NJ, scale_N, code_NJ.sum(1, dtype=torch.int32))
    code_NGK, multiplier_NG, scale_N = _int4(weight_NI)
    sum_N = (code_NGK.sum(2) * multiplier_NG).sum(1).to(torch.int32)
    shifted_NBHK = (code_NGK + 8).to(torch.uint8).view(len(code_NGK), -1, 2, GROUP)
    packed_NP = (shifted_NBHK[:, :, 0] | (shifted_NBHK[:, :, 1] << 4)).flatten(1).contiguous()
    return QuantisedRows(packed_NP, scale_N, sum_N, multiplier_NG.to(torch.uint8).contiguous())


def dequantised(rows: QuantisedRows, num_inputs: int) -> Tensor:
    """Return the weights (N, I) in fp32 that these rows represent."""
    if rows.multiplier_NG is None:
        number_NJ = rows.codes.float()
    else:
        block_NBK = rows.codes.view(len(rows.codes), -1, GROUP)
        code_NGK = torch.stack((block_NBK & 15, block_NBK >> 4), dim=2).flatten(1, 2).float() - 8
        number_NJ = (code_NGK * rows.multiplier_NG.unsqueeze(2)).flatten(1)
    return number_NJ[:, :num_inputs] * rows.scale_N.unsqueeze(1)


@torch.no_grad()
def rounded(weight_NI: Tensor, bits: int) -> Tensor:
    """Return the `dequantised` weights of a matrix at 8 or 4 bits, without packing it, in the matrix's dtype."""
    if bits == 8:
        code_NI, scale_N = _int8(weight_NI)
        return (code_NI * scale_N.unsqueeze(1)).to(weight_NI.dtype)
    code_NGK, multiplier_NG, scale_N = _int4(weight_NI)
    number_NJ = (code_NGK * multiplier_NG.unsqueeze(2)).flatten(1)
    return (number_NJ[:, : weight_NI.shape[1]] * scale_N.unsqueeze(1)).to(weight_NI.dtype)


def check_shape(config: DecoderConfig, weight_kind: WeightKind) -> None:
    """Raise ConfigError if a row of this decoder has more numbers than the library can sum."""
    widths = {
        "hidden_size": config.hidden_size,
        "num_attention_heads * head_dim": config.num_attention_heads * config.head_dim,
        "intermediate_size": config.intermediate_size,
    }
    for name, width in widths.items():
        if MATRIX_BITS[weight_kind] is not None and width > _MAX_INPUTS:
            raise ConfigError(
                f"weight_kind: {weight_kind} sums at most {_MAX_INPUTS:,} products, and this decoder's {name} is "
                f"{width:,}; set it to model"
            )


def _int8(weight_NI: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes (N, I) of -127 to 127, in fp32, and the scales."""
    real_NI = weight_NI.float()
    scale_N = (real_NI.abs().amax(1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    return (real_NI / scale_N.unsqueeze(1)).round(), scale_N.contiguous()


def _int4(weight_NI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes (N, G, K), the multipliers (N, G), both in fp32, and the scales."""
    real_NJ = functional.pad(weight_NI.float(), (0, -weight_NI.shape[1] % _VECTOR))
    scale_N = (real_NJ.abs().amax(1) / (_MAX_CODE * _MAX_MULTIPLIER)).clamp_min(torch.finfo(torch.float32).tiny)
    exact_NGK = (real_NJ / scale_N.unsqueeze(1)).view(len(real_NJ), -1, GROUP)
    whole_NG = (exact_NGK.abs().amax(2) / _MAX_CODE).ceil().clamp(1, _MAX_MULTIPLIER)
    tried = [(whole_NG - below).clamp_min(1) for below in range(_TRIED)]
    error_TNG = torch.stack(
        [
            (_codes(exact_NGK, candidate_NG) * candidate_NG.unsqueeze(2) - exact_NGK).square_().sum(2)
            for candidate_NG in tried
        ]
    )
    multiplier_NG = torch.stack(tried).gather(0, error_TNG.argmin(0, keepdim=True)).squeeze(0)
    return _codes(exact_NGK, multiplier_NG), multiplier_NG, scale_N.contiguous()


def _codes(exact_NGK: Tensor, multiplier_NG: Tensor) -> Tensor:
    return (exact_NGK / multiplier_NG.unsqueeze(2)).round_().clamp_(-_MAX_CODE, _MAX_CODE)
