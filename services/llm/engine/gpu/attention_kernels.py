"""Attention over paged contexts in two Triton kernels: query rows over splits of their contexts, then the merge.

In the first kernel a program handles a tile of query rows of one request (with all query heads that share a key/value
head) over one split of that request's context, in pieces with an online softmax (Milakov and Gimelshein 2018; Dao et
al. 2022). The beams of a request are rows of one tile, so its pages are read once for all of them. With a sliding
window only the pieces that at least one row of the tile sees are read: the pieces of the attention sinks, then the
pieces from the window on. The kernel does not know tails.

In the second kernel a program handles one query head of one row, in fp32. Splits are weighted by their log-sum-exps,
several at a time; the few keys of a beam's tail are scored and weighted in the same way. The kernel does not know
pages.

Shape suffixes: T rows of the step, E tiles, N block ids of all tiles, R rows of a program (tile rows times heads of a
group), C positions of a piece, S splits of a context, B beams, L positions of a tail, H query heads, M heads of a
group, G key/value heads, K head size.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.decoder.window import Window
from services.llm.engine.beam.tails import Tails
from services.llm.engine.kv.cache import Slots

MIN_PROGRAM_ROWS = 16
"""Minimum number of rows for `tl.dot`."""
MIN_SPLIT_TOKENS = 128
"""Minimum length of a split."""
_SPLITS_AT_ONCE = 16
"""Number of splits that the merge loads together."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceTiles:
    """Tiles in the kernel's format, int64 on the device.

    A row of `tile_E6` is: first row, number of rows, first limit, limit step, first position, start of its block ids in
    `block_table_N`.
    """

    tile_E6: Tensor
    block_table_N: Tensor
    rows_per_tile: int
    num_splits: int


def attend_splits(
    q_THK: Tensor,
    slots: Slots,
    tiles: DeviceTiles,
    block_tokens: int,
    window: Window | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Attend each row over each split of its context.

    Returns:
        The output (S, T, H, K) in this dtype, and the log-sum-exp of the scores (S, T, H) fp32, which is -inf for an
        empty
        split, whose output is not written.
    """
    num_rows, num_heads, head_dim = q_THK.shape
    num_kv_heads = slots.keys.shape[1]
    split_STHK = q_THK.new_empty((tiles.num_splits, *q_THK.shape), dtype=dtype)
    lse_STH = q_THK.new_empty(split_STHK.shape[:-1], dtype=torch.float32)
    rows = triton.next_power_of_2(max(MIN_PROGRAM_ROWS, tiles.rows_per_tile * (num_heads // num_kv_heads)))
    is_wide = q_THK.dtype == torch.float32
    _attend_split[(num_kv_heads, len(tiles.tile_E6), tiles.num_splits)](
        q_THK,
        slots.keys,
        slots.values,
        slots.keys if slots.key_scales is None else slots.key_scales,
        slots.values if slots.value_scales is None else slots.value_scales,
        tiles.tile_E6,
        tiles.block_table_N,
        split_STHK,
        lse_STH,
        num_rows,
        head_dim**-0.5,
        NUM_KV_HEADS=num_kv_heads,
        HEADS_PER_GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        HEAD_PAD=triton.next_power_of_2(max(16, head_dim)),
        BLOCK_TOKENS=block_tokens,
        WINDOW=0 if window is None else window.size,
        NUM_SINKS=0 if window is None else window.num_sinks,
        ROWS=rows,
        PIECE=32 if is_wide else 64,
        MIN_SPLIT=MIN_SPLIT_TOKENS,
        IS_SCALED=slots.key_scales is not None,
        num_warps=8 if rows > 64 else 4,
        num_stages=1 if is_wide else 3,
    )
    return split_STHK, lse_STH


@triton.jit(do_not_specialize=["num_step_rows"])  # type: ignore[untyped-decorator]
def _attend_split(  # type: ignore[no-untyped-def]
    q_ptr,  # noqa: ANN001 - Triton's own types
    k_ptr,  # noqa: ANN001
    v_ptr,  # noqa: ANN001
    k_scale_ptr,  # noqa: ANN001
    v_scale_ptr,  # noqa: ANN001
    tile_ptr,  # noqa: ANN001
    block_table_ptr,  # noqa: ANN001
    out_ptr,  # noqa: ANN001
    lse_ptr,  # noqa: ANN001
    num_step_rows,  # noqa: ANN001
    softmax_scale,  # noqa: ANN001
    NUM_KV_HEADS: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_SINKS: tl.constexpr,
    ROWS: tl.constexpr,
    PIECE: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    IS_SCALED: tl.constexpr,
) -> None:
    """Attend one tile's rows over one split of their context. Row r of the program is head r % M of tile row r // M."""
    group, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_splits = tl.num_programs(2)
    first_row = tl.load(tile_ptr + tile * 6)
    num_rows = tl.load(tile_ptr + tile * 6 + 1).to(tl.int32)
    first_limit = tl.load(tile_ptr + tile * 6 + 2).to(tl.int32)
    limit_step = tl.load(tile_ptr + tile * 6 + 3).to(tl.int32)
    first_position = tl.load(tile_ptr + tile * 6 + 4).to(tl.int32)
    first_block = tl.load(tile_ptr + tile * 6 + 5)

    row_R = tl.arange(0, ROWS) // HEADS_PER_GROUP
    head_R = group * HEADS_PER_GROUP + tl.arange(0, ROWS) % HEADS_PER_GROUP
    is_row_R = row_R < num_rows
    limit_R = first_limit + row_R * limit_step
    place_R = (first_row + row_R) * (NUM_KV_HEADS * HEADS_PER_GROUP) + head_R
    split_place_R = split * num_step_rows * (NUM_KV_HEADS * HEADS_PER_GROUP) + place_R

    context_len = first_limit + (num_rows - 1) * limit_step
    window_first, sinks_padded = 0, 0
    if WINDOW > 0:  # skip the positions between the sinks and the window
        window_first = tl.maximum(first_position + 1 - WINDOW, 0) // PIECE * PIECE
        sinks_padded = tl.minimum((NUM_SINKS + PIECE - 1) // PIECE * PIECE, window_first)
    num_read = sinks_padded + tl.maximum(context_len - window_first, 0)
    split_len = tl.maximum(tl.cdiv(tl.cdiv(num_read, num_splits), PIECE) * PIECE, MIN_SPLIT)
    start = split * split_len
    end = tl.minimum(start + split_len, num_read)
    if start >= end:
        tl.store(lse_ptr + split_place_R, tl.full((ROWS,), float("-inf"), tl.float32), mask=is_row_R)
        return

    dim_K = tl.arange(0, HEAD_PAD)
    is_dim_K = dim_K < HEAD_DIM
    is_q_RK = is_row_R[:, None] & is_dim_K[None, :]
    q_RK = tl.load(q_ptr + place_R[:, None] * HEAD_DIM + dim_K[None, :], mask=is_q_RK, other=0.0)
    base_2_scale = softmax_scale * 1.4426950408889634  # exp2 instead of exp
    peak_R = tl.full((ROWS,), float("-inf"), tl.float32)
    total_R = tl.zeros((ROWS,), tl.float32)
    out_RK = tl.zeros((ROWS, HEAD_PAD), tl.float32)
    for first in range(start, end, PIECE):
        position_C = first + tl.arange(0, PIECE)
        if WINDOW > 0:
            position_C += tl.where(first < sinks_padded, 0, window_first - sinks_padded)
        is_seen_C = position_C < context_len
        block_C = tl.load(block_table_ptr + first_block + position_C // BLOCK_TOKENS, mask=is_seen_C, other=0).to(
            tl.int64
        )
        slot_C = (block_C * BLOCK_TOKENS + position_C % BLOCK_TOKENS) * NUM_KV_HEADS + group
        is_kv_CK = is_seen_C[:, None] & is_dim_K[None, :]
        k_CK = tl.load(k_ptr + slot_C[:, None] * HEAD_DIM + dim_K[None, :], mask=is_kv_CK, other=0.0)
        v_CK = tl.load(v_ptr + slot_C[:, None] * HEAD_DIM + dim_K[None, :], mask=is_kv_CK, other=0.0)
        if IS_SCALED:
            k_scale_C = tl.load(k_scale_ptr + slot_C, mask=is_seen_C, other=0.0)
            v_scale_C = tl.load(v_scale_ptr + slot_C, mask=is_seen_C, other=0.0)
            k_CK = (k_CK.to(tl.float32) * k_scale_C[:, None]).to(q_RK.dtype)
            v_CK = (v_CK.to(tl.float32) * v_scale_C[:, None]).to(q_RK.dtype)
        product_RC = tl.dot(q_RK, tl.trans(k_CK), input_precision="ieee")
        is_seen_RC = is_row_R[:, None] & (position_C[None, :] < limit_R[:, None])
        if WINDOW > 0:
            window_R = first_position + 1 - WINDOW + row_R * limit_step
            is_seen_RC &= (position_C[None, :] >= window_R[:, None]) | (position_C[None, :] < NUM_SINKS)
        product_RC = tl.where(is_seen_RC, product_RC, float("-inf"))
        new_peak_R = tl.maximum(peak_R, tl.max(product_RC, 1))
        finite_peak_R = tl.where(new_peak_R == float("-inf"), 0.0, new_peak_R) * base_2_scale
        weight_RC = tl.exp2(product_RC * base_2_scale - finite_peak_R[:, None])  # one FMA and one exponential
        shrink_R = tl.exp2(peak_R * base_2_scale - finite_peak_R)
        total_R = total_R * shrink_R + tl.sum(weight_RC, 1)
        out_RK = out_RK * shrink_R[:, None] + tl.dot(weight_RC.to(v_CK.dtype), v_CK, input_precision="ieee")
        peak_R = new_peak_R

    total_or_one_R = tl.where(total_R == 0.0, 1.0, total_R)
    out_RK = (out_RK / total_or_one_R[:, None]).to(out_ptr.dtype.element_ty)
    lse_R = tl.where(total_R == 0.0, float("-inf"), peak_R * softmax_scale + tl.log(total_or_one_R))
    tl.store(out_ptr + split_place_R[:, None] * HEAD_DIM + dim_K[None, :], out_RK, mask=is_q_RK)
    tl.store(lse_ptr + split_place_R, lse_R, mask=is_row_R)


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
    """Merge one head of one row: the splits of its context, then the positions of its tail, if any."""
    program = tl.program_id(0).to(tl.int64)
    row, head = program // NUM_HEADS, program % NUM_HEADS
    dim_K = tl.arange(0, HEAD_PAD)
    is_dim_K = dim_K < HEAD_DIM
    split_size = num_step_rows.to(tl.int64) * NUM_HEADS

    peak, total = tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32)
    out_K = tl.zeros((HEAD_PAD,), tl.float32)
    for first in range(0, num_splits, SPLITS):
        split_S = first + tl.arange(0, SPLITS)
        cell_S = split_S * split_size + program
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
            q_K = tl.load(q_ptr + program * HEAD_DIM + dim_K, mask=is_dim_K, other=0.0).to(tl.float32)
            k_LK = tl.load(tail_k_ptr + tail_LK, mask=is_tail_LK, other=0.0).to(tl.float32)
            v_LK = tl.load(tail_v_ptr + tail_LK, mask=is_tail_LK, other=0.0).to(tl.float32)
            score_L = tl.where(is_seen_L, tl.sum(q_K[None, :] * k_LK, 1) * softmax_scale, float("-inf"))
            peak, total, out_K = _accumulate(peak, total, out_K, score_L, v_LK)

    out_K = out_K / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + program * HEAD_DIM + dim_K, out_K.to(out_ptr.dtype.element_ty), mask=is_dim_K)


@triton.jit
def _accumulate(peak, total, out_K, log_S, value_SK):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    """Add values with these log-weights to an online softmax: its maximum, its total and the weighted sum."""
    new_peak = tl.maximum(peak, tl.max(log_S, 0))
    anchor = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    shrink, weight_S = tl.exp(peak - anchor), tl.exp(log_S - anchor)
    total = total * shrink + tl.sum(weight_S, 0)
    out_K = out_K * shrink + tl.sum(value_SK * weight_S[:, None], 0)
    return new_peak, total, out_K
