"""The kernels of paged attention in Triton: one over a part of a tile's context, and one that puts the parts and a beam's tail together.

`attend_part` takes one tile of query rows of one request (with all query heads that share a key/value head) over one part
of that request's context, piece by piece with an online softmax (Milakov and Gimelshein 2018; Dao et al. 2022). The beams
of a request are rows of one tile, so its pages are read once for all of them. Under a sliding window only the pieces that
some row of the tile sees are read: those of the sinks, then those from the window on. `finish` weighs the parts of a row,
and its tail's few keys where it is a beam, by their log-sum-exps.

Shape suffixes: R rows of a program (tile rows times heads of a group), C positions of a piece, S parts, L places of a
tail, M heads of a group, K head size.
"""

import triton
import triton.language as tl

FACTS = 6
"""Numbers that describe a tile: first row, rows, first limit, limit step, first position, where its block ids begin."""


@triton.jit(do_not_specialize=["num_step_rows"])  # type: ignore[untyped-decorator]
def attend_part(  # type: ignore[no-untyped-def]
    q_ptr,  # noqa: ANN001 - Triton's own types
    k_ptr,  # noqa: ANN001
    v_ptr,  # noqa: ANN001
    k_scale_ptr,  # noqa: ANN001
    v_scale_ptr,  # noqa: ANN001
    facts_ptr,  # noqa: ANN001
    blocks_ptr,  # noqa: ANN001
    out_ptr,  # noqa: ANN001
    lse_ptr,  # noqa: ANN001
    num_step_rows,  # noqa: ANN001
    softmax_scale,  # noqa: ANN001
    NUM_GROUPS: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_SINKS: tl.constexpr,
    ROWS: tl.constexpr,
    PIECE: tl.constexpr,
    MIN_PART: tl.constexpr,
    IS_SCALED: tl.constexpr,
) -> None:
    """Attend one tile's rows over one part of their context. Row r of the program is head r % M of the tile's row r // M."""
    tile, group, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_parts = tl.num_programs(2)
    first_row = tl.load(facts_ptr + tile * 6)
    num_rows = tl.load(facts_ptr + tile * 6 + 1).to(tl.int32)
    first_limit = tl.load(facts_ptr + tile * 6 + 2).to(tl.int32)
    limit_step = tl.load(facts_ptr + tile * 6 + 3).to(tl.int32)
    first_position = tl.load(facts_ptr + tile * 6 + 4).to(tl.int32)
    first_block = tl.load(facts_ptr + tile * 6 + 5)

    row_R = tl.arange(0, ROWS) // HEADS_PER_GROUP
    head_R = group * HEADS_PER_GROUP + tl.arange(0, ROWS) % HEADS_PER_GROUP
    is_row_R = row_R < num_rows
    limit_R = first_limit + row_R * limit_step
    place_R = (first_row + row_R) * (NUM_GROUPS * HEADS_PER_GROUP) + head_R
    part_place_R = part * num_step_rows * (NUM_GROUPS * HEADS_PER_GROUP) + place_R

    context_len = first_limit + (num_rows - 1) * limit_step
    window_first, sinks_padded = 0, 0
    if WINDOW > 0:  # count positions as if those between the sinks and the window were not there
        window_first = tl.maximum(first_position + 1 - WINDOW, 0) // PIECE * PIECE
        sinks_padded = tl.minimum((NUM_SINKS + PIECE - 1) // PIECE * PIECE, window_first)
    num_read = sinks_padded + tl.maximum(context_len - window_first, 0)
    part_len = tl.maximum(tl.cdiv(tl.cdiv(num_read, num_parts), PIECE) * PIECE, MIN_PART)
    start = part * part_len
    end = tl.minimum(start + part_len, num_read)
    if start >= end:
        tl.store(lse_ptr + part_place_R, tl.full((ROWS,), float("-inf"), tl.float32), mask=is_row_R)
        return

    dim_K = tl.arange(0, HEAD_PAD)
    is_dim_K = dim_K < HEAD_DIM
    is_q_RK = is_row_R[:, None] & is_dim_K[None, :]
    q_RK = tl.load(q_ptr + place_R[:, None] * HEAD_DIM + dim_K[None, :], mask=is_q_RK, other=0.0)
    peak_R = tl.full((ROWS,), float("-inf"), tl.float32)
    total_R = tl.zeros((ROWS,), tl.float32)
    out_RK = tl.zeros((ROWS, HEAD_PAD), tl.float32)
    for first in range(start, end, PIECE):
        position_C = first + tl.arange(0, PIECE)
        if WINDOW > 0:
            position_C += tl.where(first < sinks_padded, 0, window_first - sinks_padded)
        is_seen_C = position_C < context_len
        block_C = tl.load(blocks_ptr + first_block + position_C // BLOCK_TOKENS, mask=is_seen_C, other=0).to(tl.int64)
        slot_C = (block_C * BLOCK_TOKENS + position_C % BLOCK_TOKENS) * NUM_GROUPS + group
        is_kv_CK = is_seen_C[:, None] & is_dim_K[None, :]
        k_CK = tl.load(k_ptr + slot_C[:, None] * HEAD_DIM + dim_K[None, :], mask=is_kv_CK, other=0.0)
        v_CK = tl.load(v_ptr + slot_C[:, None] * HEAD_DIM + dim_K[None, :], mask=is_kv_CK, other=0.0)
        if IS_SCALED:
            k_scale_C = tl.load(k_scale_ptr + slot_C, mask=is_seen_C, other=0.0)
            v_scale_C = tl.load(v_scale_ptr + slot_C, mask=is_seen_C, other=0.0)
            k_CK = (k_CK.to(tl.float32) * k_scale_C[:, None]).to(q_RK.dtype)
            v_CK = (v_CK.to(tl.float32) * v_scale_C[:, None]).to(q_RK.dtype)
        score_RC = tl.dot(q_RK, tl.trans(k_CK), input_precision="ieee") * softmax_scale
        is_shown_RC = is_row_R[:, None] & (position_C[None, :] < limit_R[:, None])
        if WINDOW > 0:
            window_R = first_position + 1 - WINDOW + row_R * limit_step
            is_shown_RC &= (position_C[None, :] >= window_R[:, None]) | (position_C[None, :] < NUM_SINKS)
        score_RC = tl.where(is_shown_RC, score_RC, float("-inf"))
        new_peak_R = tl.maximum(peak_R, tl.max(score_RC, 1))
        anchor_R = tl.where(new_peak_R == float("-inf"), 0.0, new_peak_R)
        weight_RC = tl.exp(score_RC - anchor_R[:, None])
        shrink_R = tl.exp(peak_R - anchor_R)
        total_R = total_R * shrink_R + tl.sum(weight_RC, 1)
        out_RK = out_RK * shrink_R[:, None] + tl.dot(weight_RC.to(v_CK.dtype), v_CK, input_precision="ieee")
        peak_R = new_peak_R

    total_or_one_R = tl.where(total_R == 0.0, 1.0, total_R)
    out_RK = (out_RK / total_or_one_R[:, None]).to(out_ptr.dtype.element_ty)
    lse_R = tl.where(total_R == 0.0, float("-inf"), peak_R + tl.log(total_or_one_R))
    tl.store(out_ptr + part_place_R[:, None] * HEAD_DIM + dim_K[None, :], out_RK, mask=is_q_RK)
    tl.store(lse_ptr + part_place_R, lse_R, mask=is_row_R)


@triton.jit(do_not_specialize=["num_step_rows", "first_beam_row", "num_parts"])  # type: ignore[untyped-decorator]
def finish(  # type: ignore[no-untyped-def]
    part_ptr,  # noqa: ANN001 - Triton's own types
    lse_ptr,  # noqa: ANN001
    q_ptr,  # noqa: ANN001
    tail_k_ptr,  # noqa: ANN001
    tail_v_ptr,  # noqa: ANN001
    seen_ptr,  # noqa: ANN001
    out_ptr,  # noqa: ANN001
    num_step_rows,  # noqa: ANN001
    first_beam_row,  # noqa: ANN001
    num_parts,  # noqa: ANN001
    softmax_scale,  # noqa: ANN001
    NUM_GROUPS: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    NUM_PLACES: tl.constexpr,
) -> None:
    """Put together what one row's heads of one group saw: the parts of its context, then the places of its tail, if it has one."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head_M = tl.arange(0, HEADS_PAD)
    dim_K = tl.arange(0, HEAD_PAD)
    is_head_M = head_M < HEADS_PER_GROUP
    is_out_MK = is_head_M[:, None] & (dim_K < HEAD_DIM)[None, :]
    place_M = row * (NUM_GROUPS * HEADS_PER_GROUP) + group * HEADS_PER_GROUP + head_M
    cell_MK = place_M[:, None] * HEAD_DIM + dim_K[None, :]
    part_size = num_step_rows * (NUM_GROUPS * HEADS_PER_GROUP)

    peak_M = tl.full((HEADS_PAD,), float("-inf"), tl.float32)
    total_M = tl.zeros((HEADS_PAD,), tl.float32)
    out_MK = tl.zeros((HEADS_PAD, HEAD_PAD), tl.float32)
    for part in range(num_parts):
        lse_M = tl.load(lse_ptr + part * part_size + place_M, mask=is_head_M, other=float("-inf"))
        is_part_MK = is_out_MK & (lse_M > float("-inf"))[:, None]
        part_MK = tl.load(part_ptr + part * part_size * HEAD_DIM + cell_MK, mask=is_part_MK, other=0.0).to(tl.float32)
        new_peak_M = tl.maximum(peak_M, lse_M)
        anchor_M = tl.where(new_peak_M == float("-inf"), 0.0, new_peak_M)
        shrink_M, share_M = tl.exp(peak_M - anchor_M), tl.exp(lse_M - anchor_M)
        total_M = total_M * shrink_M + share_M
        out_MK = out_MK * shrink_M[:, None] + part_MK * share_M[:, None]
        peak_M = new_peak_M

    if NUM_PLACES > 0:  # noqa: SIM102 - the outer one is for the compiler
        if row >= first_beam_row:
            q_MK = tl.load(q_ptr + cell_MK, mask=is_out_MK, other=0.0).to(tl.float32)
            beam = row - first_beam_row
            for place in tl.static_range(NUM_PLACES):
                if tl.load(seen_ptr + beam * NUM_PLACES + place):
                    tail_K = ((beam * NUM_PLACES + place) * NUM_GROUPS + group) * HEAD_DIM + dim_K
                    k_K = tl.load(tail_k_ptr + tail_K, mask=dim_K < HEAD_DIM, other=0.0).to(tl.float32)
                    v_K = tl.load(tail_v_ptr + tail_K, mask=dim_K < HEAD_DIM, other=0.0).to(tl.float32)
                    score_M = tl.sum(q_MK * k_K[None, :], 1) * softmax_scale
                    new_peak_M = tl.maximum(peak_M, score_M)
                    shrink_M, share_M = tl.exp(peak_M - new_peak_M), tl.exp(score_M - new_peak_M)
                    total_M = total_M * shrink_M + share_M
                    out_MK = out_MK * shrink_M[:, None] + v_K[None, :] * share_M[:, None]
                    peak_M = new_peak_M

    out_MK = out_MK / tl.where(total_M == 0.0, 1.0, total_M)[:, None]
    tl.store(out_ptr + cell_MK, out_MK.to(out_ptr.dtype.element_ty), mask=is_out_MK)
