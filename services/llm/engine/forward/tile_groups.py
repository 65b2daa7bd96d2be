"""Tiles of like size, padded into groups that attention in plain torch handles at once.

Padding repeats what is there: it is computed, and never seen. It knows no plan and no sequence.

Shape suffixes: E tiles of a group, Q rows of a tile, N blocks, R requests, T rows of the step.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models.decoder.window import Window
from services.llm.engine.forward.regular import RegularRows
from services.llm.engine.forward.tiles import Tile


@dataclass(frozen=True, slots=True, eq=False)
class TileGroup:
    """Tiles padded to one shape: a short tile repeats its last row, a short context its last block.

    All rows see positions below `min_limit`, none sees `context_len` or beyond.
    """

    rows_EQ: Tensor
    limits_EQ: Tensor
    blocks_EN: Tensor
    min_limit: int
    context_len: int
    window: "GroupWindow | None" = None


@dataclass(frozen=True, slots=True, eq=False)
class GroupWindow:
    """What a window hides of a group's contexts: positions from `num_sinks` up to `starts_EQ`.

    Block n of a context is its block n + `shift_EN`.
    """

    starts_EQ: Tensor
    shift_EN: Tensor
    num_sinks: int


def group_tiles(tiles: list[Tile], device: torch.device) -> list[TileGroup]:
    """Group tiles whose rows and whose blocks round up to the same powers of two, so that padding costs at most 4x."""
    by_size: dict[tuple[int, int], list[Tile]] = defaultdict(list)
    for tile in tiles:
        by_size[(tile.num_rows - 1).bit_length(), (len(tile.block_ids) - 1).bit_length()].append(tile)
    return [_pad(group, device) for group in by_size.values()]


def regular_group(rows: RegularRows, block_tokens: int, window: Window | None = None) -> TileGroup:
    """Group a step of one fixed shape, a tile for each request, every context padded to the longest by its last block."""
    num_requests, device = len(rows.limit_R), rows.limit_R.device
    row_T = torch.arange(num_requests * rows.rows_each, device=device)
    place_N = torch.arange(-(-rows.max_context // block_tokens), device=device)
    place_EN = torch.minimum(place_N, ((rows.limit_R - 1) // block_tokens).unsqueeze(-1))
    hidden = None
    if window is not None:
        starts_E1 = (rows.position_R + 1 - window.size).unsqueeze(-1)
        hidden = GroupWindow(starts_E1.expand(-1, rows.rows_each), torch.zeros_like(place_EN), window.num_sinks)
    return TileGroup(
        rows_EQ=row_T.view(num_requests, rows.rows_each),
        limits_EQ=rows.limit_R.unsqueeze(-1).expand(-1, rows.rows_each),
        blocks_EN=rows.blocks_N[rows.first_block_R.unsqueeze(-1) + place_EN],
        min_limit=0,
        context_len=rows.max_context,
        window=hidden,
    )


def _pad(tiles: list[Tile], device: torch.device) -> TileGroup:
    num_rows = np.array([[tile.num_rows] for tile in tiles])
    step_EQ = np.minimum(np.arange(num_rows.max()), num_rows - 1)
    first_row = np.array([[tile.first_row] for tile in tiles])
    first_limit = np.array([[tile.first_limit] for tile in tiles])
    limit_step = np.array([[tile.limit_step] for tile in tiles])
    width = max(len(tile.block_ids) for tile in tiles)
    blocks_EN = np.array([tile.block_ids + tile.block_ids[-1:] * (width - len(tile.block_ids)) for tile in tiles])
    return TileGroup(
        rows_EQ=torch.from_numpy(first_row + step_EQ).to(device),
        limits_EQ=torch.from_numpy(first_limit + step_EQ * limit_step).to(device),
        blocks_EN=torch.from_numpy(blocks_EN).to(device),
        min_limit=int(first_limit.min()),
        context_len=max(tile.context_len for tile in tiles),
        window=_pad_window(tiles, step_EQ * limit_step, width, device),
    )


def _pad_window(tiles: list[Tile], steps_EQ: np.ndarray, width: int, device: torch.device) -> GroupWindow | None:
    first_starts = [[tile.window_start] for tile in tiles if tile.window_start is not None]
    if not first_starts:
        return None
    starts_EQ = np.array(first_starts) + steps_EQ
    num_skipped = np.array([[tile.num_skipped] for tile in tiles])
    is_behind_sinks = np.arange(width) >= np.array([[tile.num_sink_blocks] for tile in tiles])
    return GroupWindow(
        starts_EQ=torch.from_numpy(starts_EQ).to(device),
        shift_EN=torch.from_numpy(num_skipped * is_behind_sinks).to(device),
        num_sinks=tiles[0].num_sinks,
    )
