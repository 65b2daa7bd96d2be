"""Captured steps of tokens: text decode, and short prompts.

Text decode takes the last token of each request and outputs logits and the most probable next tokens. Prompts take
tokens, slots and tiles, and output the hidden states of all rows.

Shape suffixes: B requests, V vocabulary, T rows of a prompt shape, E tiles, N block ids, D hidden.
"""

import numpy as np
import torch
from torch import Tensor

from services.llm.engine.forward.attention import TileBatch
from services.llm.engine.forward.layers import LayerLoop, StepInputs
from services.llm.engine.gpu.graph_device import CapturedStep, GraphDevice
from services.llm.engine.gpu.graph_shapes import MAX_PROMPTS, PromptShape, TextShape
from services.llm.engine.gpu.step_table import StepTable
from services.llm.engine.plan import Chunk, StepPlan
from services.llm.engine.sequence import Sequence
from services.llm.engine.text.sampling import SampledBatch, SamplingInput, sample

_COLUMNS = 3
"""Token, position, slot."""
_TILE_NUMBERS = 6


class TextGraph:
    """One captured shape of text decode."""

    def __init__(
        self, shape: TextShape, forward: LayerLoop, vocab_size: int, table: StepTable, device: GraphDevice
    ) -> None:
        self._num_requests = shape.num_requests
        self._forward = forward
        self._vocab_size = vocab_size
        self._table = table
        inputs = [table.numbers, table.sampled_B]
        self.step = CapturedStep(device, self._body, inputs, lambda: table.fill([], shape.num_requests))

    def run(self, sequences: list[Sequence]) -> SampledBatch:
        """Sample each request's next token. Does not wait.

        Sampling parameters and masks are prepared while the device runs the graph.
        """
        self._table.fill(sequences, self._num_requests)
        logits_BV, token_B = self.step.replay()
        draws = [SamplingInput.of(sequence) for sequence in sequences]
        if any(not draw.is_plain_greedy for draw in draws):
            return sample(logits_BV[: len(draws)], draws)
        return SampledBatch(token_B[: len(draws)].clone(), logits_BV, [None] * len(draws))

    def _body(self) -> tuple[Tensor, ...]:
        columns = self._table.columns(self._num_requests)
        pages = self._forward.prepare_uniform(self._table.batch(self._num_requests, 1))
        hidden_BD = self._forward.hidden(
            StepInputs(
                self._table.tokens(self._num_requests), columns["position"], columns["slot_mapping"], pages, tails=None
            )
        )
        logits_BV = self._forward.logits(hidden_BD, 0, self._vocab_size)
        return logits_BV, torch.argmax(logits_BV, dim=-1)


class PromptTable:
    """The inputs of captured prompts, shared by all shapes; only one shape runs at a time.

    All integers are in one tensor that stays in place: columns with a number per row, then the tiles, then their block
    ids. Rows beyond the prompts' tokens are padding: they write to the scratch block and see one token of it, so that
    their values stay finite.
    """

    def __init__(
        self,
        max_rows: int,
        max_context: int,
        block_tokens: int,
        scratch_block: int,
        max_tile_rows: int,
        device: torch.device,
    ) -> None:
        self._block_tokens = block_tokens
        self._max_context = max_context
        self._scratch = scratch_block
        self._max_tile_rows = max_tile_rows
        self._is_pinned = device.type == "cuda"
        num_blocks = MAX_PROMPTS * -(-max_context // block_tokens) + 1
        self.numbers = torch.zeros(
            _COLUMNS * max_rows + _TILE_NUMBERS * self._num_tiles(max_rows) + num_blocks,
            dtype=torch.int64,
            device=device,
        )

    def columns(self, num_rows: int) -> tuple[Tensor, ...]:
        """Return the rows' tokens, positions and slots (T,) as views."""
        return self.numbers[: _COLUMNS * num_rows].view(_COLUMNS, num_rows).unbind(0)

    def tiles(self, num_rows: int) -> TileBatch:
        """Return the tiles of a shape as views."""
        first = _COLUMNS * num_rows
        end = first + _TILE_NUMBERS * self._num_tiles(num_rows)
        return TileBatch(
            tile_E6=self.numbers[first:end].view(-1, _TILE_NUMBERS),
            block_table_N=self.numbers[end:],
            rows_per_tile=self._height(num_rows),
            max_context=self._max_context,
        )

    def fill(self, chunks: list[Chunk], num_rows: int) -> None:
        """Write the inputs of these prompts' tokens, and copy them to the device."""
        columns = np.zeros((_COLUMNS, num_rows), dtype=np.int64)
        columns[2] = self._scratch * self._block_tokens
        tiles: list[tuple[int, ...]] = []
        blocks: list[int] = [self._scratch]
        row = 0
        for chunk in chunks:
            table = chunk.sequence.block_table[: -(-chunk.end // self._block_tokens)]
            position_C = np.arange(chunk.start, chunk.end)
            rows = slice(row, row + chunk.num_tokens)
            columns[0, rows] = chunk.tokens
            columns[1, rows] = position_C
            columns[2, rows] = np.array(table)[position_C // self._block_tokens] * self._block_tokens
            columns[2, rows] += position_C % self._block_tokens
            tiles += self._cut(row, chunk.num_tokens, chunk.start, 1, len(blocks), num_rows)
            blocks += table
            row += chunk.num_tokens
        tiles += self._cut(row, num_rows - row, 0, 0, 0, num_rows)
        tiles += [(tiles[0][0], 0, *tiles[0][2:])] * (self._num_tiles(num_rows) - len(tiles))
        host = torch.empty(
            columns.size + _TILE_NUMBERS * len(tiles) + len(blocks), dtype=torch.int64, pin_memory=self._is_pinned
        )
        host.numpy()[:] = np.concatenate((columns.ravel(), np.array(tiles).ravel(), blocks))
        self.numbers[: len(host)].copy_(host, non_blocking=True)

    def _cut(
        self, row: int, count: int, start: int, step: int, first_block: int, num_rows: int
    ) -> list[tuple[int, ...]]:
        """Cut rows at positions from `start` into tiles; with step 0 all rows are at that position."""
        height = self._height(num_rows)
        return [
            (
                row + offset,
                min(height, count - offset),
                start + offset * step + 1,
                step,
                start + offset * step,
                first_block,
            )
            for offset in range(0, count, height)
        ]

    def _height(self, num_rows: int) -> int:
        return max(1, min(self._max_tile_rows, num_rows))

    def _num_tiles(self, num_rows: int) -> int:
        """Return the number of tiles that suffices for any division of the rows among prompts and padding."""
        return -(-num_rows // self._height(num_rows)) + MAX_PROMPTS


class PromptGraph:
    """One captured shape of prompts."""

    def __init__(self, shape: PromptShape, forward: LayerLoop, table: PromptTable, device: GraphDevice) -> None:
        self._num_rows = shape.num_rows
        self._forward = forward
        self._table = table
        self.step = CapturedStep(device, self._body, [table.numbers], lambda: table.fill([], shape.num_rows))

    def run(self, plan: StepPlan) -> Tensor:
        """Return the hidden states (T, D) of a plan's chunks in order; the next replay overwrites them.

        Does not wait.
        """
        self._table.fill(plan.chunks, self._num_rows)
        return self.step.replay()[0]

    def _body(self) -> tuple[Tensor, ...]:
        token_T, position_T, slot_T = self._table.columns(self._num_rows)
        pages = self._forward.prepare_tiles(self._table.tiles(self._num_rows))
        return (self._forward.hidden(StepInputs(token_T, position_T, slot_T, pages, tails=None)),)
