"""How the query rows of a step are cut into tiles for attention.

A tile is up to `tile_queries` rows of one request over that request's blocks: a piece of a prefill chunk (causal, each
row sees one position more), one token of text decode, or a request's beams (all see the same prompt). In a layer with a
sliding window a tile holds only the blocks that some of its rows see: those of the sinks, then those from the window on.
Pure numbers on the host; no torch.
"""

from dataclasses import dataclass, replace

from models.decoder.window import Window
from services.llm.engine.schedule.plan import StepPlan


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows `first_row` on, at position `first_position` on. Row i sees the first `first_limit + i * limit_step` positions of the context.

    Under a window it does not see those from `num_sinks` up to `window_start + i * limit_step`. `num_skipped` whole blocks
    that no row sees are left out behind the sinks' `num_sink_blocks`.
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
        """Positions that the last row sees."""
        return self.first_limit + (self.num_rows - 1) * self.limit_step


def cut_tiles(plan: StepPlan, tile_queries: int, block_tokens: int, window: Window | None = None) -> list[Tile]:
    """Cut a step, whose rows are the chunks' tokens and then the beams, in plan order; for the layers with this window, if any."""
    tiles = _cut(plan, tile_queries, block_tokens)
    return tiles if window is None else [_leave_out_unseen(tile, window, block_tokens) for tile in tiles]


def _cut(plan: StepPlan, tile_queries: int, block_tokens: int) -> list[Tile]:
    tiles: list[Tile] = []
    row = 0
    for chunk in plan.chunks:
        for start in range(0, chunk.num_tokens, tile_queries):
            count = min(tile_queries, chunk.num_tokens - start)
            limit = chunk.start + start + 1
            blocks = chunk.sequence.block_ids[: -(-(limit + count - 1) // block_tokens)]
            tiles.append(Tile(row + start, count, limit, 1, blocks, limit - 1))
        row += chunk.num_tokens
    for sequence in plan.beam_steps:
        rows = sequence.num_beam_rows
        position = sequence.num_computed + sequence.num_levels_done - 1
        for start in range(0, rows, tile_queries):
            count = min(tile_queries, rows - start)
            tiles.append(Tile(row + start, count, sequence.num_computed, 0, sequence.block_ids, position))
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
