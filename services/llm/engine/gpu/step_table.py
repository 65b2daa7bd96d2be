"""The integers of a recorded step: columns of one number for each request, then all block ids, in one tensor that stays in place.

One copy brings them to the device, which the host does not wait for. Requests beyond those that are there only pad: they
see one token of the scratch block and write to it.

Shape suffixes: R requests of the shape, N block ids.
"""

from itertools import chain

import numpy as np
import torch
from torch import Tensor

from services.llm.engine.forward.regular import RegularRows
from services.llm.engine.schedule.sequence import Sequence

_ALIGNED = 2
"""Columns begin at multiples of 16 bytes, so that kernels are compiled for one kind of address alone."""


class StepTable:
    """Room for so many requests' numbers and block ids, shared by all shapes, of which one runs at a time."""

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

    def columns(self, num_requests: int) -> dict[str, Tensor]:
        """Return the views (R,) that a shape of so many requests reads: token, position, slot, limit and first_block."""
        stride = _stride(num_requests)
        return {name: self.numbers[place * stride :][:num_requests] for place, name in enumerate(_COLUMNS)}

    def rows(self, num_requests: int, rows_each: int) -> RegularRows:
        """Return the pages that a shape's rows see, as views."""
        columns = self.columns(num_requests)
        return RegularRows(
            limit_R=columns["limit"],
            position_R=columns["position"],
            first_block_R=columns["first_block"],
            blocks_N=self.numbers[len(_COLUMNS) * _stride(num_requests) :],
            rows_each=rows_each,
            max_context=self._max_context,
        )

    def fill(self, sequences: list[Sequence], num_requests: int) -> None:
        """Write what these requests need for their next token or level, and copy it to the device."""
        facts = [self._facts(sequence) for sequence in sequences]
        blocks = [
            sequence.block_ids[: -(-limit // self._block_tokens)]
            for sequence, (_, _, _, limit) in zip(sequences, facts, strict=True)
        ]
        num_padding = num_requests - len(sequences)
        facts += [(0, 0, self._scratch * self._block_tokens, 1)] * num_padding
        *starts, end = np.cumsum([0, *(len(ids) for ids in blocks)]).tolist()
        starts += [end] * num_padding
        stride, num_blocks = _stride(num_requests), end + 1
        host = torch.zeros(len(_COLUMNS) * stride + num_blocks, dtype=torch.int64, pin_memory=self._is_pinned)
        table, ids = np.split(host.numpy(), [len(_COLUMNS) * stride])
        table.reshape(len(_COLUMNS), stride)[:, :num_requests] = np.column_stack((facts, starts)).T
        ids[:] = np.fromiter(chain(*blocks, [self._scratch]), np.int64, num_blocks)
        self.numbers[: len(host)].copy_(host, non_blocking=True)

    def _facts(self, sequence: Sequence) -> tuple[int, int, int, int]:
        """Return token, position, slot and limit: of the token generated last, or of beams, whose tokens are elsewhere."""
        position = len(sequence.tokens) - 1
        if sequence.num_levels:
            return 0, position + sequence.num_levels_done, 0, sequence.num_computed
        block = sequence.block_ids[position // self._block_tokens]
        slot = block * self._block_tokens + position % self._block_tokens
        return sequence.tokens[-1], position, slot, position + 1


_COLUMNS = ("token", "position", "slot", "limit", "first_block")


def _stride(num_requests: int) -> int:
    return -(-num_requests // _ALIGNED) * _ALIGNED
