"""Tiles: cuts the query rows of a step for attention, and pads tiles of similar size into groups.

A tile is up to `tile_queries` rows of one request over that request's blocks: a piece of a prefill chunk (causal: each
row sees one position more than the row before), one token of text decode, or the beams of a request (all see the same
prompt). In a layer with a sliding window a tile lists only the blocks that at least one of its rows sees: the blocks of
the attention sinks, then the blocks from the window on. Attention in plain torch runs over groups of padded tiles.

Shape suffixes: E tiles of a group, Q rows of a tile, N blocks, R requests, T rows of the step.
"""

from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from models.decoder.window import Window
from services.llm.engine.forward.attention import TileBatch, UniformBatch
from services.llm.engine.plan import StepPlan


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows from `first_row`, at positions from `first_position`.

    Row i sees the first `first_limit + i * limit_step` positions. With a window, it does not see the positions from
    `num_sinks` up to `window_start + i * limit_step`, and `block_ids` skips `num_skipped` whole blocks that no row
    sees, after the first `num_sink_blocks`.
    """

    first_row: int
    num_rows: int
    first_limit: int
    limit_step: int
    block_ids: list[int]
    first_position: int = 0
    window_start: int | None = None
    num_sinks: int = 0
    num_sink_blocks: int = 0
    num_skipped: int = 0

    @property
    def context_len(self) -> int:
        """Number of positions that the last row sees."""
        return self.first_limit + (self.num_rows - 1) * self.limit_step


def cut_tiles(plan: StepPlan, tile_queries: int, block_tokens: int, window: Window | None = None) -> list[Tile]:
    """Cut a step into tiles for the layers with this window (None: full attention).

    Rows are the chunks' tokens, then the beams.
    """
    tiles = _cut(plan, tile_queries, block_tokens)
    return tiles if window is None else [_leave_out_unseen(tile, window, block_tokens) for tile in tiles]


def _cut(plan: StepPlan, tile_queries: int, block_tokens: int) -> list[Tile]:
    tiles: list[Tile] = []
    row = 0
    for chunk in plan.chunks:
        height = 1 if chunk.sequence.drafts else tile_queries  # as without drafts, so that not a bit differs
        for start in range(0, chunk.num_tokens, height):
            count = min(height, chunk.num_tokens - start)
            limit = chunk.start + start + 1
            blocks = chunk.sequence.block_table[: -(-(limit + count - 1) // block_tokens)]
            tiles.append(Tile(row + start, count, limit, 1, blocks, limit - 1))
        row += chunk.num_tokens
    for sequence in plan.beam_steps:
        rows = sequence.num_beam_rows
        position = sequence.num_computed_tokens + sequence.num_levels_done - 1
        for start in range(0, rows, tile_queries):
            count = min(tile_queries, rows - start)
            tiles.append(Tile(row + start, count, sequence.num_computed_tokens, 0, sequence.block_table, position))
        row += rows
    return tiles


def _leave_out_unseen(tile: Tile, window: Window, block_tokens: int) -> Tile:
    start = window.start(tile.first_position)
    num_sink_blocks = -(-window.num_sinks // block_tokens)
    num_skipped = max(0, start // block_tokens - num_sink_blocks)
    return replace(
        tile,
        block_ids=tile.block_ids[:num_sink_blocks] + tile.block_ids[num_sink_blocks + num_skipped :],
        window_start=tile.first_position + 1 - window.size,
        num_sinks=window.num_sinks,
        num_sink_blocks=num_sink_blocks,
        num_skipped=num_skipped,
    )


@dataclass(frozen=True, slots=True, eq=False)
class TileGroup:
    """Tiles padded to one shape: a short tile repeats its last row, a short context its last block.

    Padding is masked or discarded. All rows see the positions below `min_limit`; no row sees `context_len` or beyond.
    """

    rows_EQ: Tensor
    limits_EQ: Tensor
    block_table_EN: Tensor
    min_limit: int
    context_len: int
    window: "GroupWindow | None" = None


@dataclass(frozen=True, slots=True, eq=False)
class GroupWindow:
    """The window of a group: positions from `num_sinks` up to `starts_EQ` are masked.

    Entry n of a tile's block table is block n + `shift_EN` of its context.
    """

    starts_EQ: Tensor
    shift_EN: Tensor
    num_sinks: int


def group_tiles(tiles: list[Tile], device: torch.device) -> list[TileGroup]:
    """Group tiles whose numbers of rows and blocks round up to the same powers of two: padding costs at most 4x."""
    by_size: dict[tuple[int, int], list[Tile]] = defaultdict(list)
    for tile in tiles:
        by_size[(tile.num_rows - 1).bit_length(), (len(tile.block_ids) - 1).bit_length()].append(tile)
    return [_pad(group, device) for group in by_size.values()]


def uniform_group(batch: UniformBatch, block_tokens: int, window: Window | None = None) -> TileGroup:
    """Return a step of one fixed shape as one group: a tile per request.

    Each context is padded to the longest by repeating its last block.
    """
    num_requests, device = len(batch.limit_R), batch.limit_R.device
    row_T = torch.arange(num_requests * batch.rows_per_request, device=device)
    place_N = torch.arange(-(-batch.max_context // block_tokens), device=device)
    place_EN = torch.minimum(place_N, ((batch.limit_R - 1) // block_tokens).unsqueeze(-1))
    hidden = None
    if window is not None:
        starts_E1 = (batch.position_R + 1 - window.size).unsqueeze(-1)
        hidden = GroupWindow(starts_E1.expand(-1, batch.rows_per_request), torch.zeros_like(place_EN), window.num_sinks)
    return TileGroup(
        rows_EQ=row_T.view(num_requests, batch.rows_per_request),
        limits_EQ=batch.limit_R.unsqueeze(-1).expand(-1, batch.rows_per_request),
        block_table_EN=batch.block_table_N[batch.first_block_R.unsqueeze(-1) + place_EN],
        min_limit=0,
        context_len=batch.max_context,
        window=hidden,
    )


def recorded_group(batch: TileBatch, block_tokens: int, window: Window | None = None) -> TileGroup:
    """Return a fixed number of tiles as one group, each context padded to the longest.

    An unused tile computes the first row.
    """
    row_E, num_rows_E, limit_E, step_E, position_E, first_block_E = batch.tile_E6.unbind(1)
    last_E1 = (num_rows_E - 1).clamp_min(0).unsqueeze(-1)
    place_EQ = torch.arange(batch.rows_per_tile, device=row_E.device).minimum(last_E1)
    step_EQ = place_EQ * step_E.unsqueeze(-1)
    place_N = torch.arange(-(-batch.max_context // block_tokens), device=row_E.device)
    last_block_E1 = (limit_E.unsqueeze(-1) + last_E1 * step_E.unsqueeze(-1) - 1) // block_tokens
    place_EN = place_N.minimum(last_block_E1)
    hidden = None
    if window is not None:
        starts_EQ = (position_E + 1 - window.size).unsqueeze(-1) + step_EQ
        hidden = GroupWindow(starts_EQ, torch.zeros_like(place_EN), window.num_sinks)
    return TileGroup(
        rows_EQ=row_E.unsqueeze(-1) + place_EQ,
        limits_EQ=limit_E.unsqueeze(-1) + step_EQ,
        block_table_EN=batch.block_table_N[first_block_E.unsqueeze(-1) + place_EN],
        min_limit=0,
        context_len=batch.max_context,
        window=hidden,
    )


def _pad(tiles: list[Tile], device: torch.device) -> TileGroup:
    num_rows = np.array([[tile.num_rows] for tile in tiles])
    step_EQ = np.minimum(np.arange(num_rows.max()), num_rows - 1)
    first_row = np.array([[tile.first_row] for tile in tiles])
    first_limit = np.array([[tile.first_limit] for tile in tiles])
    limit_step = np.array([[tile.limit_step] for tile in tiles])
    width = max(len(tile.block_ids) for tile in tiles)
    block_table_EN = np.array([tile.block_ids + tile.block_ids[-1:] * (width - len(tile.block_ids)) for tile in tiles])
    return TileGroup(
        rows_EQ=torch.from_numpy(first_row + step_EQ).to(device),
        limits_EQ=torch.from_numpy(first_limit + step_EQ * limit_step).to(device),
        block_table_EN=torch.from_numpy(block_table_EN).to(device),
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
