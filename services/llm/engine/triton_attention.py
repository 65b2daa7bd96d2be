"""Attention over paged contexts in Triton: one kernel for prefill chunks, text decode and beams.

A program takes one tile of query rows of one request (with all query heads that share a key/value head) over one part of
that request's context, in tiles with an online softmax (Milakov and Gimelshein 2018; Dao et al. 2022). The beams of a
request are rows of one tile, so its pages are read once for all of them; a long context is split over programs, whose
results are merged by their log-sum-exps. Held to `TorchAttention`, also in Triton's interpreter on a CPU.

Shape suffixes: T rows of the step, E tiles, N blocks, S parts of a context, H query heads, G key/value heads, K head size.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from services.llm.engine.kv_cache import KvCache
from services.llm.engine.plan import StepPlan
from services.llm.engine.tiles import Tile, cut_tiles

_MAX_TILE_ROWS = 128
_TARGET_PROGRAMS = 264
_MIN_PART_TOKENS = 256


@dataclass(frozen=True, slots=True, eq=False)
class TileTable:
    """Tiles as the kernel reads them: (E, 4) first row, rows, first limit, limit step; (E, N) block ids. int32, on the device."""

    tiles_E4: Tensor
    blocks_EN: Tensor
    rows_per_tile: int
    num_parts: int


class TritonAttention:
    """Attention of each row over its own context, on a CUDA device (or, interpreted, on a CPU)."""

    def __init__(self, num_heads: int, num_groups: int, block_tokens: int, device: torch.device) -> None:
        self._heads_per_group = num_heads // num_groups
        self._num_groups = num_groups
        self._block_tokens = block_tokens
        self._device = device

    def prepare(self, plan: StepPlan) -> TileTable:
        """Cut a step into tiles that fit a program (rows times heads of a group at most 128) and lay them out."""
        return self.lay_out(cut_tiles(plan, max(1, _MAX_TILE_ROWS // self._heads_per_group), self._block_tokens))

    def lay_out(self, tiles: list[Tile]) -> TileTable:
        """Put tiles on the device, and decide over how many programs each one's context is split."""
        width = max(len(tile.block_ids) for tile in tiles)
        blocks = np.zeros((len(tiles), width), dtype=np.int32)
        for row, tile in zip(blocks, tiles, strict=True):
            row[: len(tile.block_ids)] = tile.block_ids
        facts = [(tile.first_row, tile.num_rows, tile.first_limit, tile.limit_step) for tile in tiles]
        return TileTable(
            tiles_E4=torch.tensor(facts, dtype=torch.int32).to(self._device),
            blocks_EN=torch.from_numpy(blocks).to(self._device),
            rows_per_tile=max(tile.num_rows for tile in tiles),
            num_parts=self._num_parts(tiles),
        )

    def attend(self, q_THK: Tensor, cache: KvCache, layer: int, tiles: TileTable) -> tuple[Tensor, Tensor]:
        """Give the output (T, H, K) and the log-sum-exp of each row's scores (T, H) fp32."""
        num_rows, num_heads, head_dim = q_THK.shape
        num_parts = tiles.num_parts
        part_STHK = torch.empty((num_parts, *q_THK.shape), dtype=torch.float32, device=q_THK.device)
        lse_STH = torch.empty((num_parts, num_rows, num_heads), dtype=torch.float32, device=q_THK.device)
        slots = cache.slots(layer)
        rows = triton.next_power_of_2(max(16, tiles.rows_per_tile * self._heads_per_group))
        _attend[(len(tiles.tiles_E4), self._num_groups, num_parts)](
            q_THK.contiguous(),
            slots.keys,
            slots.values,
            slots.key_scales if slots.key_scales is not None else slots.keys,
            slots.value_scales if slots.value_scales is not None else slots.values,
            tiles.tiles_E4,
            tiles.blocks_EN,
            part_STHK,
            lse_STH,
            tiles.blocks_EN.shape[1],
            num_rows,
            head_dim**-0.5,
            NUM_GROUPS=self._num_groups,
            HEADS_PER_GROUP=self._heads_per_group,
            HEAD_DIM=head_dim,
            HEAD_PAD=triton.next_power_of_2(max(16, head_dim)),
            BLOCK_TOKENS=self._block_tokens,
            ROWS=rows,
            TILE=64 if rows <= 64 else 32,
            NUM_PARTS=num_parts,
            IS_SCALED=slots.key_scales is not None,
        )
        if num_parts == 1:
            return part_STHK[0].to(q_THK.dtype), lse_STH[0]
        lse_TH = lse_STH.logsumexp(0)
        share_STH = (lse_STH - lse_TH).exp_().unsqueeze(-1)
        return (part_STHK * share_STH).sum(0).to(q_THK.dtype), lse_TH

    def _num_parts(self, tiles: list[Tile]) -> int:
        """Split contexts when there are too few tiles to fill the device and the contexts are long enough."""
        longest = max(tile.context_len for tile in tiles)
        wanted = -(-_TARGET_PROGRAMS // (len(tiles) * self._num_groups))
        return max(1, min(wanted, longest // _MIN_PART_TOKENS))


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    q_ptr,  # noqa: ANN001 - Triton's own types
    k_ptr,  # noqa: ANN001
    v_ptr,  # noqa: ANN001
    k_scale_ptr,  # noqa: ANN001
    v_scale_ptr,  # noqa: ANN001
    tiles_ptr,  # noqa: ANN001
    blocks_ptr,  # noqa: ANN001
    out_ptr,  # noqa: ANN001
    lse_ptr,  # noqa: ANN001
    table_width,  # noqa: ANN001
    num_step_rows,  # noqa: ANN001
    softmax_scale,  # noqa: ANN001
    NUM_GROUPS: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    IS_SCALED: tl.constexpr,
) -> None:
    """Attend one tile's rows over one part of their context. Row r of the program is head r % M of the tile's row r // M."""
    tile, group, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_row = tl.load(tiles_ptr + tile * 4)
    num_rows = tl.load(tiles_ptr + tile * 4 + 1)
    first_limit = tl.load(tiles_ptr + tile * 4 + 2)
    limit_step = tl.load(tiles_ptr + tile * 4 + 3)

    row_R = tl.arange(0, ROWS) // HEADS_PER_GROUP
    head_R = group * HEADS_PER_GROUP + tl.arange(0, ROWS) % HEADS_PER_GROUP
    is_row_R = row_R < num_rows
    limit_R = first_limit + row_R * limit_step
    place_R = ((first_row + row_R) * (NUM_GROUPS * HEADS_PER_GROUP) + head_R).to(tl.int64)
    dim_K = tl.arange(0, HEAD_PAD)
    is_dim_K = dim_K < HEAD_DIM
    is_q_RK = is_row_R[:, None] & is_dim_K[None, :]
    q_RK = tl.load(q_ptr + place_R[:, None] * HEAD_DIM + dim_K[None, :], mask=is_q_RK, other=0.0)

    context_len = first_limit + (num_rows - 1) * limit_step
    part_len = tl.cdiv(tl.cdiv(context_len, NUM_PARTS), TILE) * TILE
    start = part * part_len
    end = tl.minimum(start + part_len, context_len)

    peak_R = tl.full((ROWS,), float("-inf"), tl.float32)
    total_R = tl.zeros((ROWS,), tl.float32)
    out_RK = tl.zeros((ROWS, HEAD_PAD), tl.float32)
    for first in range(start, end, TILE):
        position_C = first + tl.arange(0, TILE)
        is_seen_C = position_C < end
        block_C = tl.load(blocks_ptr + tile * table_width + position_C // BLOCK_TOKENS, mask=is_seen_C, other=0).to(
            tl.int64
        )
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
        is_shown_RC = is_row_R[:, None] & is_seen_C[None, :] & (position_C[None, :] < limit_R[:, None])
        score_RC = tl.where(is_shown_RC, score_RC, float("-inf"))
        new_peak_R = tl.maximum(peak_R, tl.max(score_RC, 1))
        anchor_R = tl.where(new_peak_R == float("-inf"), 0.0, new_peak_R)
        weight_RC = tl.exp(score_RC - anchor_R[:, None])
        shrink_R = tl.exp(peak_R - anchor_R)
        total_R = total_R * shrink_R + tl.sum(weight_RC, 1)
        out_RK = out_RK * shrink_R[:, None] + tl.dot(weight_RC.to(v_CK.dtype), v_CK, input_precision="ieee")
        peak_R = new_peak_R

    out_RK = out_RK / tl.where(total_R == 0.0, 1.0, total_R)[:, None]
    lse_R = tl.where(total_R == 0.0, float("-inf"), peak_R + tl.log(tl.where(total_R == 0.0, 1.0, total_R)))
    part_place_R = part.to(tl.int64) * num_step_rows * NUM_GROUPS * HEADS_PER_GROUP + place_R
    tl.store(out_ptr + part_place_R[:, None] * HEAD_DIM + dim_K[None, :], out_RK, mask=is_q_RK)
    tl.store(lse_ptr + part_place_R, lse_R, mask=is_row_R)
