"""The forward pass on a CUDA device: the layer loop over Triton kernels and cuBLAS.

Graphs remove the cost of launching kernels from Python, see `graphs.py`. The Triton kernels here are RMSNorm (plain,
and fused with the residual addition) and SiLU times gate: a program handles a row, or a piece of a row, in fp32 for any
dtype of the tensors. Compared with `TorchOps` in the tests.

Shape suffixes: T rows, D hidden, F feed-forward, I and N in and out of a matrix, X = (query heads + 2 key/value heads)
* head size.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from services.llm.engine.beam.tails import Tails
from services.llm.engine.forward.layers import LayerLoop
from services.llm.engine.forward.weights import DecoderWeights, HeadNorms
from services.llm.engine.gpu.attention import TritonAttention
from services.llm.engine.gpu.rope_kernel import rope_and_store
from services.llm.engine.kv.cache import KvCache

_PIECE = 1_024
"""Numbers per program of SiLU times gate."""


def triton_forward(
    weights: DecoderWeights, cache: KvCache, reduce: Callable[[Tensor], Tensor] | None = None
) -> LayerLoop:
    """Build the forward pass on the device of the weights. `reduce` sums the parts of ranks."""
    shape = weights.config
    attention = TritonAttention(
        shape.num_attention_heads, shape.num_key_value_heads, cache.block_tokens, weights.head_VD.device, shape.window
    )
    return LayerLoop(weights, cache, TritonOps(), attention, *([reduce] if reduce is not None else []))


class TritonOps:
    """Implements `Ops` in any model dtype on CUDA (or on a CPU in Triton's interpreter)."""

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """Normalise rows by their root mean square (Zhang and Sennrich 2019)."""
        normed_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
        _launch_norm(x_TD, None, weight_D, eps, normed_TD, normed_TD)
        return normed_TD

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Add, then normalise. Returns the normalised rows and the sum.

        The sum is rounded to the tensors' dtype before it is normalised.
        """
        normed_TD, sum_TD = torch.empty_like(residual_TD), torch.empty_like(residual_TD)
        _launch_norm(x_TD, residual_TD, weight_D, eps, normed_TD, sum_TD)
        return normed_TD, sum_TD

    def rope_and_store(
        self,
        qkv_TX: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        norms: HeadNorms | None,
        eps: float,
        cache: KvCache,
        layer: int,
        slot_mapping_P: Tensor,
        tails: Tails | None,
    ) -> Tensor:
        """Norm, rotate and store the heads in one kernel."""
        tail = None if tails is None else tails.layer(layer)
        return rope_and_store(qkv_TX, cos_sin, norms, eps, cache.slots(layer), slot_mapping_P, tail)

    def silu_mul(self, gate_up_TJ: Tensor) -> Tensor:
        """Multiply SiLU of the first half of each row with the second half (Shazeer 2020). (T, 2F) -> (T, F)."""
        num_rows, width = gate_up_TJ.shape
        out_TF = gate_up_TJ.new_empty(num_rows, width // 2)
        if num_rows:
            grid = (num_rows, triton.cdiv(width // 2, _PIECE))
            _silu_mul[grid](gate_up_TJ, out_TF, gate_up_TJ.stride(0), width // 2, PIECE=_PIECE)
        return out_TF

    def linear(self, x_TI: Tensor, weight_NI: Tensor, bias_N: Tensor | None) -> Tensor:
        """Multiply with cuBLAS."""
        return functional.linear(x_TI, weight_NI, bias_N)


def _launch_norm(
    x_TD: Tensor, residual_TD: Tensor | None, weight_D: Tensor, eps: float, normed_TD: Tensor, sum_TD: Tensor
) -> None:
    num_rows, size = x_TD.shape
    if num_rows:
        piece = triton.next_power_of_2(size)
        _rms_norm[(num_rows,)](
            x_TD,
            x_TD if residual_TD is None else residual_TD,
            weight_D,
            normed_TD,
            sum_TD,
            x_TD.stride(0),
            size,
            eps,
            ADDS=residual_TD is not None,
            PIECE=piece,
            num_warps=min(8, max(1, piece // 512)),
        )


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm(  # type: ignore[no-untyped-def]
    x_ptr,  # noqa: ANN001 - Triton's own types
    residual_ptr,  # noqa: ANN001
    weight_ptr,  # noqa: ANN001
    normed_ptr,  # noqa: ANN001
    sum_ptr,  # noqa: ANN001
    x_stride,  # noqa: ANN001
    size,  # noqa: ANN001
    eps,  # noqa: ANN001
    ADDS: tl.constexpr,
    PIECE: tl.constexpr,
) -> None:
    """Normalise one row, with ADDS after adding the residual's row."""
    row = tl.program_id(0).to(tl.int64)
    dim_D = tl.arange(0, PIECE)
    is_dim_D = dim_D < size
    x_D = tl.load(x_ptr + row * x_stride + dim_D, mask=is_dim_D, other=0.0).to(tl.float32)
    if ADDS:
        x_D += tl.load(residual_ptr + row * size + dim_D, mask=is_dim_D, other=0.0).to(tl.float32)
        sum_D = x_D.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * size + dim_D, sum_D, mask=is_dim_D)
        x_D = sum_D.to(tl.float32)
    weight_D = tl.load(weight_ptr + dim_D, mask=is_dim_D, other=0.0).to(tl.float32)
    normed_D = x_D * tl.rsqrt(tl.sum(x_D * x_D, 0) / size + eps) * weight_D
    tl.store(normed_ptr + row * size + dim_D, normed_D.to(normed_ptr.dtype.element_ty), mask=is_dim_D)


@triton.jit  # type: ignore[untyped-decorator]
def _silu_mul(  # type: ignore[no-untyped-def]
    gate_up_ptr,  # noqa: ANN001 - Triton's own types
    out_ptr,  # noqa: ANN001
    stride,  # noqa: ANN001
    size,  # noqa: ANN001
    PIECE: tl.constexpr,
) -> None:
    """Multiply one piece of one row."""
    row = tl.program_id(0).to(tl.int64)
    dim_F = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    is_dim_F = dim_F < size
    gate_F = tl.load(gate_up_ptr + row * stride + dim_F, mask=is_dim_F, other=0.0).to(tl.float32)
    up_F = tl.load(gate_up_ptr + row * stride + size + dim_F, mask=is_dim_F, other=0.0).to(tl.float32)
    product_F = gate_F / (1.0 + tl.exp(-gate_F)) * up_F
    tl.store(out_ptr + row * size + dim_F, product_F.to(out_ptr.dtype.element_ty), mask=is_dim_F)
