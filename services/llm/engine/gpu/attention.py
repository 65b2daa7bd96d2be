"""Attention over paged contexts on a CUDA device, in Triton: prefill chunks, text decode and beams alike.

Lays a step out as tiles that fit a program, decides over how many programs each context is split, and runs the two kernels:
over parts of contexts (`part_kernel.py`), then over their results and the beams' tails (`finish_kernel.py`). Held to
`TorchAttention`, also in Triton's interpreter on a CPU.

Shape suffixes: T rows of the step, E tiles, R requests, Q tiles of a request, S parts of a context, H query heads, K head size.
"""

import numpy as np
import torch
from torch import Tensor

from models.decoder.window import Window
from services.llm.engine.beam.tails import Tails
from services.llm.engine.forward.regular import RegularRows
from services.llm.engine.forward.tiles import Tile, cut_tiles
from services.llm.engine.forward.transfer import to_device
from services.llm.engine.gpu.finish_kernel import finish
from services.llm.engine.gpu.part_kernel import MIN_PART_TOKENS, MIN_PROGRAM_ROWS, TileTable, attend_parts
from services.llm.engine.kv.cache import KvCache
from services.llm.engine.schedule.plan import StepPlan

_MAX_PROGRAM_ROWS = 128
_MULTIPROCESSORS = 132
"""Of a Hopper. A program of more than 64 rows takes more than half of one's registers; of smaller ones two and more fit."""


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
        """Put tiles on the device, those of the longest contexts first, and decide over how many programs each one's context is split.

        Programs start in this order: so no long one starts when the others are done.
        """
        tiles = sorted(tiles, key=lambda tile: -tile.context_len)
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
        height = self._height(max(tile.num_rows for tile in tiles))
        return TileTable(
            facts_E6=to_device(np.array(facts, dtype=np.int64), self._device),
            blocks_N=to_device(blocks, self._device),
            rows_per_tile=height,
            num_parts=self._num_parts(len(tiles), height, tiles[0].context_len),
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
        num_parts = self._num_parts(num_requests * tiles_each, per_tile, rows.max_context)
        return TileTable(torch.stack(facts, dim=1), rows.blocks_N, per_tile, num_parts)

    def _height(self, num_rows: int) -> int:
        """Round rows of a tile up to one of two, so that steps that run as they come do not wait for a compiler."""
        lowest = max(1, MIN_PROGRAM_ROWS // self._heads_per_group)
        return lowest if num_rows <= lowest else self.max_tile_rows

    def _num_parts(self, num_tiles: int, rows_per_tile: int, longest: int) -> int:
        """Split contexts of up to `longest` tokens when there are too few tiles to fill the device, into no more than run at once."""
        is_tall = rows_per_tile * self._heads_per_group > _MAX_PROGRAM_ROWS // 2
        at_once = _MULTIPROCESSORS if is_tall else 2 * _MULTIPROCESSORS
        return max(1, min(at_once // (num_tiles * self._num_groups), longest // MIN_PART_TOKENS))

    def attend(self, q_THK: Tensor, cache: KvCache, layer: int, prepared: TileTable, tails: Tails | None) -> Tensor:
        """Attend each row over its own context, and beams over their tails besides."""
        q_THK, slots = q_THK.contiguous(), cache.slots(layer)
        window = self._window if self._window is not None and layer in self._window.layers else None
        is_whole = prepared.num_parts == 1 and tails is None
        dtype = q_THK.dtype if is_whole else torch.float32
        part_STHK, lse_STH = attend_parts(q_THK, slots, prepared, self._block_tokens, window, dtype)
        return part_STHK[0] if is_whole else finish(part_STHK, lse_STH, q_THK, tails, layer, self._num_groups)
