"""Attention over paged contexts on a CUDA device, in Triton: prefill chunks, text decode and beams alike.

Cuts a step into tiles that fit one program each, chooses the number of splits of each context (split-KV, as in
FlashDecoding), and launches the two kernels of `attention_kernels.py`: attention over one split, then the merge of the
splits with the beams' tails. Compared with `TorchAttention` in the tests.

Shape suffixes: T rows of the step, E tiles, R requests, Q tiles of a request, S splits of a context, H query heads, K
head size.
"""

import numpy as np
import torch
from torch import Tensor

from models.decoder.window import Window
from services.llm.engine.beam.tails import Tails
from services.llm.engine.device import to_device
from services.llm.engine.forward.attention import TileBatch, UniformBatch
from services.llm.engine.forward.tiles import Tile, cut_tiles
from services.llm.engine.gpu.attention_kernels import (
    MIN_PROGRAM_ROWS,
    MIN_SPLIT_TOKENS,
    DeviceTiles,
    attend_splits,
    merge_states,
)
from services.llm.engine.kv.cache import KvCache
from services.llm.engine.plan import StepPlan

_MAX_PROGRAM_ROWS = 128
_MULTIPROCESSORS = 132
"""For a Hopper GPU. A program of more than 64 rows uses more than half of a multiprocessor's registers; two or more
smaller programs fit."""


class TritonAttention:
    """Implements `PagedAttention` on a CUDA device (or on a CPU in Triton's interpreter)."""

    def __init__(
        self, num_heads: int, num_kv_heads: int, block_tokens: int, device: torch.device, window: Window | None = None
    ) -> None:
        self._heads_per_group = num_heads // num_kv_heads
        self._num_kv_heads = num_kv_heads
        self._block_tokens = block_tokens
        self._device = device
        self._window = window

    @property
    def max_tile_rows(self) -> int:
        """Rows of the largest tile: a program handles at most 128 pairs of a row and a query head of the group."""
        return max(1, _MAX_PROGRAM_ROWS // self._heads_per_group)

    def prepare(self, plan: StepPlan) -> DeviceTiles:
        """Cut a step into tiles that fit a program and copy their table to the device."""
        return self.lay_out(cut_tiles(plan, self.max_tile_rows, self._block_tokens))

    def lay_out(self, tiles: list[Tile]) -> DeviceTiles:
        """Return the tiles as a table on the device, longest contexts first, with the number of splits.

        Programs start in the table's order, so no long program starts when the others have finished.
        """
        tiles = sorted(tiles, key=lambda tile: -tile.context_len)
        ends = np.cumsum([len(tile.block_ids) for tile in tiles])
        table = [
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
        height = self._height(max(tile.num_rows for tile in tiles))
        return DeviceTiles(
            tile_E6=to_device(np.array(table, dtype=np.int64), self._device),
            block_table_N=to_device(blocks, self._device),
            rows_per_tile=height,
            num_splits=self._num_splits(len(tiles), height, tiles[0].context_len),
        )

    def prepare_uniform(self, batch: UniformBatch) -> DeviceTiles:
        """Return the table of a step of one fixed shape, computed entirely on the device."""
        num_requests, per_tile = len(batch.limit_R), min(self.max_tile_rows, batch.rows_per_request)
        first_Q = torch.arange(0, batch.rows_per_request, per_tile, device=batch.limit_R.device)
        tiles_each = len(first_Q)
        request_E = torch.arange(num_requests * tiles_each, device=first_Q.device) // tiles_each
        first_E = first_Q.repeat(num_requests)
        columns = (
            request_E * batch.rows_per_request + first_E,
            (batch.rows_per_request - first_E).clamp_max(per_tile),
            batch.limit_R[request_E],
            torch.zeros_like(first_E),
            batch.position_R[request_E],
            batch.first_block_R[request_E],
        )
        num_splits = self._num_splits(num_requests * tiles_each, per_tile, batch.max_context)
        return DeviceTiles(torch.stack(columns, dim=1), batch.block_table_N, per_tile, num_splits)

    def prepare_tiles(self, batch: TileBatch) -> DeviceTiles:
        """Return the table, with an empty context for unused tiles: their programs end immediately."""
        row_E, num_rows_E, limit_E, step_E, *more = batch.tile_E6.unbind(1)
        is_tile_E = (num_rows_E > 0).long()
        tile_E6 = torch.stack((row_E, num_rows_E, limit_E * is_tile_E, step_E * is_tile_E, *more), dim=1)
        num_splits = self._num_splits(len(tile_E6), batch.rows_per_tile, batch.max_context)
        return DeviceTiles(tile_E6, batch.block_table_N, batch.rows_per_tile, num_splits)

    def _height(self, num_rows: int) -> int:
        """Round the rows of a tile up to one of two sizes, so that eager steps do not trigger compilations."""
        lowest = max(1, MIN_PROGRAM_ROWS // self._heads_per_group)
        return lowest if num_rows <= lowest else self.max_tile_rows

    def _num_splits(self, num_tiles: int, rows_per_tile: int, longest: int) -> int:
        """Return the number of splits of contexts of up to `longest` tokens; 1 if the tiles already fill the device."""
        is_tall = rows_per_tile * self._heads_per_group > _MAX_PROGRAM_ROWS // 2
        at_once = _MULTIPROCESSORS if is_tall else 2 * _MULTIPROCESSORS
        return max(1, min(at_once // (num_tiles * self._num_kv_heads), longest // MIN_SPLIT_TOKENS))

    def attend(self, q_THK: Tensor, cache: KvCache, layer: int, prepared: DeviceTiles, tails: Tails | None) -> Tensor:
        """Attend each row over its own context, and beams over their tails as well."""
        q_THK, slots = q_THK.contiguous(), cache.slots(layer)
        window = self._window if self._window is not None and layer in self._window.layers else None
        is_whole = prepared.num_splits == 1 and tails is None
        dtype = q_THK.dtype if is_whole else torch.float32
        split_STHK, lse_STH = attend_splits(q_THK, slots, prepared, self._block_tokens, window, dtype)
        return split_STHK[0] if is_whole else merge_states(split_STHK, lse_STH, q_THK, tails, layer, self._num_kv_heads)
