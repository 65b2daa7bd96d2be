"""How the pages of a step's rows are laid out for the compiled attention. Host side, numpy; nothing is padded.

Shape suffixes: E tiles, N blocks of all tiles.
"""

from dataclasses import dataclass

import numpy as np

from models.decoder.window import Window
from services.llm.engine.forward.tiles import Tile, cut_tiles
from services.llm.engine.schedule.plan import StepPlan

_TILE_QUERIES = 64
"""Rows of a tile: enough to share what is read of a page, few enough to skip most of what causality hides."""
_NO_WINDOW = -(2**30)
"""Where the window of a tile without one starts: before everything."""


@dataclass(frozen=True, slots=True, eq=False)
class CpuPages:
    """Tiles (E, 10) int64 as `attention.h` reads them, for full layers and for windowed ones, over one list of blocks."""

    tiles_E: np.ndarray
    windowed_E: np.ndarray | None
    blocks_N: np.ndarray


def lay_out(plan: StepPlan, block_tokens: int, window: Window | None) -> CpuPages:
    """Cut a step into tiles, the longest contexts first, so that threads end together."""
    tiles = cut_tiles(plan, _TILE_QUERIES, block_tokens)
    windowed = [] if window is None else cut_tiles(plan, _TILE_QUERIES, block_tokens, window)
    tiles.sort(key=_work_of, reverse=True)
    blocks_N = np.array([block for tile in (*tiles, *windowed) for block in tile.block_ids], dtype=np.int64)
    starts = np.cumsum([0, *(len(tile.block_ids) for tile in (*tiles, *windowed))])
    facts = np.array(
        [_facts(tile, start) for tile, start in zip((*tiles, *windowed), starts[:-1].tolist(), strict=True)],
        dtype=np.int64,
    )
    return CpuPages(facts[: len(tiles)], facts[len(tiles) :] if windowed else None, blocks_N)


def _work_of(tile: Tile) -> int:
    return tile.num_rows * tile.context_len


def _facts(tile: Tile, first_block: int) -> tuple[int, ...]:
    return (
        tile.first_row,
        tile.num_rows,
        tile.first_limit,
        tile.limit_step,
        first_block,
        len(tile.block_ids),
        _NO_WINDOW if tile.window_start is None else tile.window_start,
        tile.num_sinks,
        tile.num_sink_blocks,
        tile.num_skipped,
    )
