"""Merges the attention states of the splits of a context, and a beam's tail, in one Triton kernel.

A program handles one query head of one row, in fp32. Splits are weighted by their log-sum-exps, several at a time; the few keys of
a tail are scored and weighted in the same way. It knows no pages.

Shape suffixes: T rows of the step, S splits, B beams, L positions of a tail, H query heads, G key/value heads, K head size.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.llm.engine.beam.tails import Tails

_SPLITS_AT_ONCE = 16


def merge_states(
    split_STHK: Tensor, lse_STH: Tensor, q_THK: Tensor, tails: Tails | None, layer: int, num_kv_heads: int
) -> Tensor:
    """Return the output (T, H, K). With `tails`, the last rows are beams."""
    num_rows, num_heads, head_dim = q_THK.shape
    out_THK = torch.empty_like(q_THK)
    _merge_states[(num_rows * num_heads,)](
        split_STHK,
        lse_STH,
        q_THK,
        q_THK if tails is None else tails.keys_YBLGK[layer],
        q_THK if tails is None else tails.values_YBLGK[layer],
        q_THK if tails is None else tails.seen_BL,
        out_THK,
        num_rows,
        num_rows if tails is None else num_rows - len(tails.place_B),
        len(split_STHK),
        head_dim**-0.5,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HEAD_PAD=triton.next_power_of_2(head_dim),
        NUM_PLACES=0 if tails is None else tails.seen_BL.shape[1],
        PLACES_PAD=1 if tails is None else triton.next_power_of_2(tails.seen_BL.shape[1]),
        SPLITS=_SPLITS_AT_ONCE,
        num_warps=1,
    )
    return out_THK


@triton.jit(do_not_specialize=["num_step_rows", "first_beam_row", "num_splits"])  # type: ignore[untyped-decorator]
def _merge_states(  # type: ignore[no-untyped-def]
    split_ptr,  # noqa: ANN001 - Triton's own types
    lse_ptr,  # noqa: ANN001
    q_ptr,  # noqa: ANN001
    tail_k_ptr,  # noqa: ANN001
    tail_v_ptr,  # noqa: ANN001
    seen_ptr,  # noqa: ANN001
    out_ptr,  # noqa: ANN001
    num_step_rows,  # noqa: ANN001
    first_beam_row,  # noqa: ANN001
    num_splits,  # noqa: ANN001
    softmax_scale,  # noqa: ANN001
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    NUM_PLACES: tl.constexpr,
    PLACES_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Merge one head of one row: the splits of its context, then the positions of its tail, if it has one."""
    place = tl.program_id(0).to(tl.int64)
    row, head = place // NUM_HEADS, place % NUM_HEADS
    dim_K = tl.arange(0, HEAD_PAD)
    is_dim_K = dim_K < HEAD_DIM
    split_size = num_step_rows.to(tl.int64) * NUM_HEADS

    peak, total = tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32)
    out_K = tl.zeros((HEAD_PAD,), tl.float32)
    for first in range(0, num_splits, SPLITS):
        split_S = first + tl.arange(0, SPLITS)
        cell_S = split_S * split_size + place
        lse_S = tl.load(lse_ptr + cell_S, mask=split_S < num_splits, other=float("-inf"))
        is_split_SK = (lse_S > float("-inf"))[:, None] & is_dim_K[None, :]
        split_SK = tl.load(split_ptr + cell_S[:, None] * HEAD_DIM + dim_K[None, :], mask=is_split_SK, other=0.0)
        peak, total, out_K = _accumulate(peak, total, out_K, lse_S, split_SK)

    if NUM_PLACES > 0:  # noqa: SIM102 - the outer condition is resolved by the compiler
        if row >= first_beam_row:
            place_L = tl.arange(0, PLACES_PAD)
            cell_L = (row - first_beam_row) * NUM_PLACES + place_L
            is_seen_L = tl.load(seen_ptr + cell_L, mask=place_L < NUM_PLACES, other=0) != 0
            tail_LK = (cell_L * NUM_KV_HEADS + head // (NUM_HEADS // NUM_KV_HEADS))[:, None] * HEAD_DIM + dim_K[None, :]
            is_tail_LK = is_seen_L[:, None] & is_dim_K[None, :]
            q_K = tl.load(q_ptr + place * HEAD_DIM + dim_K, mask=is_dim_K, other=0.0).to(tl.float32)
            k_LK = tl.load(tail_k_ptr + tail_LK, mask=is_tail_LK, other=0.0).to(tl.float32)
            v_LK = tl.load(tail_v_ptr + tail_LK, mask=is_tail_LK, other=0.0).to(tl.float32)
            score_L = tl.where(is_seen_L, tl.sum(q_K[None, :] * k_LK, 1) * softmax_scale, float("-inf"))
            peak, total, out_K = _accumulate(peak, total, out_K, score_L, v_LK)

    out_K = out_K / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + place * HEAD_DIM + dim_K, out_K.to(out_ptr.dtype.element_ty), mask=is_dim_K)


@triton.jit
def _accumulate(peak, total, out_K, log_S, value_SK):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    """Add values with these log-weights to an online softmax: its maximum, its total and the weighted sum."""
    new_peak = tl.maximum(peak, tl.max(log_S, 0))
    anchor = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    shrink, weight_S = tl.exp(peak - anchor), tl.exp(log_S - anchor)
    total = total * shrink + tl.sum(weight_S, 0)
    out_K = out_K * shrink + tl.sum(value_SK * weight_S[:, None], 0)
    return new_peak, total, out_K
