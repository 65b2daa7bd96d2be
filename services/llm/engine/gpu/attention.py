"""Attention over paged contexts on a CUDA device, in Triton: prefill chunks, text decode and beams alike.

Lays a step out as tiles that fit a program, decides over how many programs each context is split, and launches the two
kernels: over parts of contexts, then over their results and the beams' tails. Held to `TorchAttention`, also in Triton's
interpreter on a CPU.

Shape suffixes: T rows of the step, E tiles, N block ids of all tiles, S parts of a context, H query heads, G key/value
heads, K head size.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor

from models.window import Window
from services.llm.engine.gpu.attention_kernels import attend_part, finish
from services.llm.engine.kv_cache import KvCache
from services.llm.engine.plan import StepPlan
from services.llm.engine.regular import RegularRows
from services.llm.engine.tails import Tails
from services.llm.engine.tiles import Tile, cut_tiles
from services.llm.engine.transfer import to_device

_MIN_PROGRAM_ROWS = 16
_MAX_PROGRAM_ROWS = 128
_TARGET_PROGRAMS = 264
_MIN_PART_TOKENS = 128


@dataclass(frozen=True, slots=True, eq=False)
class TileTable:
    """Tiles as the kernel reads them: (E, 6) facts, each tile's block ids one after another. int64, on the device."""

    facts_E6: Tensor
    blocks_N: Tensor
    rows_per_tile: int
    num_parts: int


class TritonAttention:
    """Attention of each row over its own context, on a CUDA device (or, interpreted, on a CPU)."""

    def __init__(
        self, num_heads: int, num_groups: int, block_tokens: int, device: torch.device, window: Window | None = None
    ) -> None:
        self._heads_per_group = num_heads // num_groups
        self._num_groups = num_groups
        self._block_tokens = block_tokens
        self._device = device
        self._window = window

    @property
    def max_tile_rows(self) -> int:
        """Rows of a tile so that a program handles at most 128, each row having one for each head of a group."""
        return max(1, _MAX_PROGRAM_ROWS // self._heads_per_group)

    def prepare(self, plan: StepPlan) -> TileTable:
        """Cut a step into tiles that fit a program and lay them out."""
        return self.lay_out(cut_tiles(plan, self.max_tile_rows, self._block_tokens))

    def lay_out(self, tiles: list[Tile]) -> TileTable:
        """Put tiles on the device, and decide over how many programs each one's context is split."""
        ends = np.cumsum([len(tile.block_ids) for tile in tiles])
        facts = [
            (
                tile.first_row,
                tile.num_rows,
                tile.first_limit,
                tile.limit_step,
                tile.first_position,
                end - len(tile.block_ids),
            )
            for tile, end in zip(tiles, ends.tolist(), strict=True)
        ]
        blocks = np.concatenate([tile.block_ids for tile in tiles]).astype(np.int64)
        return TileTable(
            facts_E6=to_device(np.array(facts, dtype=np.int64), self._device),
            blocks_N=to_device(blocks, self._device),
            rows_per_tile=self._height(max(tile.num_rows for tile in tiles)),
            num_parts=self.num_parts(len(tiles), max(tile.context_len for tile in tiles)),
        )

    def prepare_regular(self, rows: RegularRows) -> TileTable:
        """Lay out a step of one fixed shape: each request's rows cut into tiles alike."""
        num_requests, per_tile = len(rows.limit_R), min(self.max_tile_rows, rows.rows_each)
        first_Q = torch.arange(0, rows.rows_each, per_tile, device=rows.limit_R.device)
        tiles_each = len(first_Q)
        request_E = torch.arange(num_requests * tiles_each, device=first_Q.device) // tiles_each
        first_E = first_Q.repeat(num_requests)
        facts = (
            request_E * rows.rows_each + first_E,
            (rows.rows_each - first_E).clamp_max(per_tile),
            rows.limit_R[request_E],
            torch.zeros_like(first_E),
            rows.position_R[request_E],
            rows.first_block_R[request_E],
        )
        num_parts = self.num_parts(num_requests * tiles_each, rows.max_context)
        return TileTable(torch.stack(facts, dim=1), rows.blocks_N, per_tile, num_parts)

    def _height(self, num_rows: int) -> int:
        """Round rows of a tile up to one of two, so that steps that run as they come do not wait for a compiler."""
        lowest = max(1, _MIN_PROGRAM_ROWS // self._heads_per_group)
        return lowest if num_rows <= lowest else self.max_tile_rows

    def num_parts(self, num_tiles: int, longest: int) -> int:
        """Split contexts of up to `longest` tokens when there are too few tiles to fill the device."""
        wanted = -(-_TARGET_PROGRAMS // (num_tiles * self._num_groups))
        return max(1, min(wanted, longest // _MIN_PART_TOKENS))

    def attend(self, q_THK: Tensor, cache: KvCache, layer: int, prepared: TileTable, tails: Tails | None) -> Tensor:
        """Attend each row over its own context, and beams over their tails besides."""
        q_THK = q_THK.contiguous()
        is_whole = prepared.num_parts == 1 and tails is None
        part_STHK = torch.empty(
            (prepared.num_parts, *q_THK.shape), dtype=q_THK.dtype if is_whole else torch.float32, device=q_THK.device
        )
        lse_STH = torch.empty(part_STHK.shape[:-1], dtype=torch.float32, device=q_THK.device)
        self._attend_parts(q_THK, cache, layer, prepared, part_STHK, lse_STH)
        return part_STHK[0] if is_whole else self._finish(part_STHK, lse_STH, q_THK, layer, tails)

    def _attend_parts(
        self, q_THK: Tensor, cache: KvCache, layer: int, tiles: TileTable, part_STHK: Tensor, lse_STH: Tensor
    ) -> None:
        num_rows, _, head_dim = q_THK.shape
        slots = cache.slots(layer)
        window = self._window if self._window is not None and layer in self._window.layers else None
        rows = triton.next_power_of_2(max(_MIN_PROGRAM_ROWS, tiles.rows_per_tile * self._heads_per_group))
        is_wide = q_THK.dtype == torch.float32
        attend_part[(len(tiles.facts_E6), self._num_groups, tiles.num_parts)](
            q_THK,
            slots.keys,
            slots.values,
            slots.key_scales if slots.key_scales is not None else slots.keys,
            slots.value_scales if slots.value_scales is not None else slots.values,
            tiles.facts_E6,
            tiles.blocks_N,
            part_STHK,
            lse_STH,
            num_rows,
            head_dim**-0.5,
            NUM_GROUPS=self._num_groups,
            HEADS_PER_GROUP=self._heads_per_group,
            HEAD_DIM=head_dim,
            HEAD_PAD=triton.next_power_of_2(max(16, head_dim)),
            BLOCK_TOKENS=self._block_tokens,
            WINDOW=window.size if window is not None else 0,
            NUM_SINKS=window.num_sinks if window is not None else 0,
            ROWS=rows,
            PIECE=32 if is_wide else 64,
            MIN_PART=_MIN_PART_TOKENS,
            IS_SCALED=slots.key_scales is not None,
            num_warps=8 if rows > 64 else 4,
            num_stages=1 if is_wide else 3,
        )

    def _finish(self, part_STHK: Tensor, lse_STH: Tensor, q_THK: Tensor, layer: int, tails: Tails | None) -> Tensor:
        num_rows, _, head_dim = q_THK.shape
        out_THK = torch.empty_like(q_THK)
        finish[(num_rows, self._num_groups)](
            part_STHK,
            lse_STH,
            q_THK,
            q_THK if tails is None else tails.keys_YBLGK[layer],
            q_THK if tails is None else tails.values_YBLGK[layer],
            q_THK if tails is None else tails.seen_BL,
            out_THK,
            num_rows,
            num_rows if tails is None else num_rows - len(tails.place_B),
            len(part_STHK),
            head_dim**-0.5,
            NUM_GROUPS=self._num_groups,
            HEADS_PER_GROUP=self._heads_per_group,
            HEADS_PAD=triton.next_power_of_2(self._heads_per_group),
            HEAD_DIM=head_dim,
            HEAD_PAD=triton.next_power_of_2(head_dim),
            NUM_PLACES=0 if tails is None else tails.seen_BL.shape[1],
            num_warps=1,
        )
        return out_THK
