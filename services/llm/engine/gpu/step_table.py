"""The integer inputs of a captured step in one tensor that stays in place.

The tensor has columns with a number per request, then all block ids. One asynchronous copy brings them to the device;
tokens sampled by the previous step are read on the device. Unused requests of a shape are padding: they see one token
of the scratch block and write to it.

Shape suffixes: R requests of the shape, N block ids.
"""

from collections.abc import Sequence as Many
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from services.llm.engine.forward.attention import UniformBatch
from services.llm.engine.sequence import Sequence

_ALIGNED = 2
"""Columns are aligned to 16 bytes, so that each kernel is compiled for only one pointer alignment."""


class StepTable:
    """The table for up to `max_requests` requests, shared by all shapes; only one shape runs at a time."""

    def __init__(
        self, max_requests: int, max_context: int, block_tokens: int, scratch_block: int, device: torch.device
    ) -> None:
        self._block_tokens = block_tokens
        self._max_context = max_context
        self._scratch = scratch_block
        self._is_pinned = device.type == "cuda"
        blocks_each = -(-max_context // block_tokens)
        num_columns = len(_COLUMNS) * (max_requests + _ALIGNED)
        self.numbers = torch.zeros(num_columns + max_requests * blocks_each, dtype=torch.int64, device=device)
        self.sampled_B = torch.zeros(max_requests, dtype=torch.int64, device=device)
        """The tokens that the last step sampled, in the order of the call to `keep`."""

    def columns(self, num_requests: int) -> dict[str, Tensor]:
        """Return the columns (R,) that a shape of this many requests reads, as views."""
        stride = _stride(num_requests)
        return {name: self.numbers[column * stride :][:num_requests] for column, name in enumerate(_COLUMNS)}

    def tokens(self, num_requests: int) -> Tensor:
        """Return the texts' last tokens (R,): as written, or as sampled by the previous step if unknown to the host."""
        columns = self.columns(num_requests)
        token_R, is_fed_R = columns["token"], columns["is_fed"]
        return torch.where(is_fed_R > 0, self.sampled_B[token_R * is_fed_R], token_R)

    def keep(self, sampled: Many[tuple[list[Sequence], Tensor]]) -> None:
        """Copy a step's sampled tokens, so that the next step can start before the host knows them. Does not wait."""
        start = 0
        for sequences, token_R in sampled:
            self.sampled_B[start : start + len(sequences)] = token_R
            for row, sequence in enumerate(sequences, start=start):
                sequence.device_row = row
            start += len(sequences)

    def batch(self, num_requests: int, rows_per_request: int) -> UniformBatch:
        """Return a shape's rows and their pages, as views."""
        columns = self.columns(num_requests)
        return UniformBatch(
            limit_R=columns["limit"],
            position_R=columns["position"],
            first_block_R=columns["first_block"],
            block_table_N=self.numbers[len(_COLUMNS) * _stride(num_requests) :],
            rows_per_request=rows_per_request,
            max_context=self._max_context,
        )

    def fill(self, sequences: list[Sequence], num_requests: int) -> None:
        """Write the inputs of these requests' next token or level, and copy them to the device."""
        rows = [self._row(sequence) for sequence in sequences]
        blocks = [
            sequence.block_table[: -(-limit // self._block_tokens)]
            for sequence, (_, _, _, limit, _) in zip(sequences, rows, strict=True)
        ]
        num_padding = num_requests - len(sequences)
        rows += [(0, 0, self._scratch * self._block_tokens, 1, 0)] * num_padding
        *starts, end = np.cumsum([0, *(len(ids) for ids in blocks)]).tolist()
        starts += [end] * num_padding
        stride, num_blocks = _stride(num_requests), end + 1
        host = torch.zeros(len(_COLUMNS) * stride + num_blocks, dtype=torch.int64, pin_memory=self._is_pinned)
        table, ids = np.split(host.numpy(), [len(_COLUMNS) * stride])
        table.reshape(len(_COLUMNS), stride)[:, :num_requests] = np.column_stack((rows, starts)).T
        ids[:] = np.fromiter(chain(*blocks, [self._scratch]), np.int64, num_blocks)
        self.numbers[: len(host)].copy_(host, non_blocking=True)

    def _row(self, sequence: Sequence) -> tuple[int, int, int, int, int]:
        """Return token (or its row on the device), position, slot, limit, and whether it is fed.

        For beams token and slot are unused.
        """
        position = sequence.num_tokens - 1
        if sequence.num_levels:
            return 0, position + sequence.num_levels_done, 0, sequence.num_computed_tokens, 0
        block = sequence.block_table[position // self._block_tokens]
        slot = block * self._block_tokens + position % self._block_tokens
        is_fed = sequence.num_pending > 0
        return sequence.device_row if is_fed else sequence.tokens[-1], position, slot, position + 1, int(is_fed)


_COLUMNS = ("token", "position", "slot_mapping", "limit", "is_fed", "first_block")


def _stride(num_requests: int) -> int:
    return -(-num_requests // _ALIGNED) * _ALIGNED
