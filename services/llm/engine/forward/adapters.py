"""The slots of an engine's adapters: low-rank matrices of one fixed size, which the rows of a step choose among.

All slots of a joined matrix lie in one tensor, with ranks padded by zeros to the slot's rank, so no address and no
shape depends on which adapters are loaded. The module decides nothing; `services.llm.engine.adapters` does.

Shape suffixes: S slots, P projections of a joined matrix, R rank of a slot, N and I out and in of a joined matrix, T
rows, U slots that a step uses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from models.decoder.adapter import Adapter, projections_of
from models.decoder.config import DecoderConfig
from models.decoder.layer import MATRICES
from services.llm.engine.device import to_device
from services.llm.engine.plan import StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class SlotMatrix:
    """The adapters of a joined matrix. Projection p has the columns `starts[p]` to `starts[p + 1]` of `up_SRN`."""

    down_SPRI: Tensor
    up_SRN: Tensor
    starts: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class AdapterRows:
    """The slot of each row, -1 for the base, and the segments (first row, end, slot) of rows with an equal slot."""

    slot_T: Tensor
    segments: np.ndarray

    @classmethod
    def of(cls, slots: np.ndarray, device: torch.device) -> "AdapterRows":
        """Return the rows with these slots (T,) int64."""
        changes = np.flatnonzero(np.diff(slots, prepend=-2, append=-2))
        segments = [(first, end, slots[first]) for first, end in pairwise(changes) if slots[first] >= 0]
        return cls(to_device(slots, device), np.array(segments, dtype=np.int64).reshape(-1, 3))


@dataclass(frozen=True, slots=True, eq=False)
class StepAdapters:
    """The slots of all rows of a step, and of its output rows."""

    every: AdapterRows
    outputs: AdapterRows

    @classmethod
    def of_rows(
        cls, counts: Sequence[tuple[int, int]], output_rows: np.ndarray, device: torch.device
    ) -> "StepAdapters":
        """Return the slots of a step's rows: pairs of a slot and its number of successive rows."""
        slots, numbers = np.array(counts, dtype=np.int64).T
        every = np.repeat(slots, numbers)
        return cls(AdapterRows.of(every, device), AdapterRows.of(every[output_rows], device))

    def of(self, rows_R: Tensor | None) -> AdapterRows:
        """Return the slots of the output rows, or of all rows for None."""
        return self.every if rows_R is None else self.outputs


class StepAdaptersCache:
    """The slots of the last step's rows: successive steps of texts have the same."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._key: tuple[object, ...] = ()
        self._last: StepAdapters | None = None

    def of_plan(self, plan: StepPlan, output_rows: np.ndarray) -> StepAdapters | None:
        """Return the slots of a plan's rows, in its order; None if all rows belong to the base."""
        counts = [(chunk.sequence.adapter_slot, chunk.num_tokens) for chunk in plan.chunks]
        counts += [(sequence.adapter_slot, sequence.num_beam_rows) for sequence in plan.beam_steps]
        if all(slot < 0 for slot, _ in counts):
            return None
        key = (*counts, output_rows.tobytes())
        if key != self._key:
            self._key, self._last = key, StepAdapters.of_rows(counts, output_rows, self._device)
        return self._last


def slot_bytes(config: DecoderConfig, rank: int, number_bytes: int) -> int:
    """Return the bytes of a slot."""
    sizes = (row.rows(config) + row.columns(config) for row in projections_of(config))
    return config.num_hidden_layers * rank * sum(sizes) * number_bytes


class AdapterSlots:
    """The slots' memory. A slot is written as a whole, in the order of the engine's steps."""

    def __init__(
        self, config: DecoderConfig, num_slots: int, rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.rank = rank
        self.ranks = np.zeros(num_slots, dtype=np.int64)
        """The rank of each slot's adapter; stays in place."""
        self.layers = tuple(
            {name: _empty(config, name, num_slots, rank, dtype, device) for name in MATRICES}
            for _ in range(config.num_hidden_layers)
        )

    @torch.inference_mode()
    def write(self, slot: int, adapter: Adapter) -> None:
        """Replace the adapter of a slot. Its rank is at most the slot's."""
        self.ranks[slot] = adapter.rank
        for index, matrices in enumerate(self.layers):
            for name, matrix in matrices.items():
                matrix.down_SPRI[slot].zero_()
                matrix.up_SRN[slot].zero_()
                for part, row in enumerate(MATRICES[name]):
                    if (pair := adapter.pairs.get(f"layers.{index}.{row.name}")) is not None:
                        rank = len(pair.a_RI)
                        matrix.down_SPRI[slot, part, :rank].copy_(pair.a_RI)
                        columns = slice(*matrix.starts[part : part + 2])
                        matrix.up_SRN[slot, :rank, columns].copy_((pair.scale * pair.b_NR.float()).T)

    def change(self, layer: int, name: str, x_TI: Tensor, rows: AdapterRows) -> Tensor:
        """Return the adapters' change (T, N) of a joined matrix's output; 0 in rows of the base.

        Each row is multiplied by every slot that the step uses, and by 0 for the slots of other rows: a few large
        products instead of many small ones.
        """
        matrix = self.layers[layer][name]
        used_U = to_device(np.unique(rows.segments[:, 2]), x_TI.device)
        down_UPRI, up_URN = matrix.down_SPRI[used_U], matrix.up_SRN[used_U]
        is_own_TU = rows.slot_T[:, None] == used_U
        low_TUPR = (x_TI @ down_UPRI.flatten(0, 2).T).view(-1, *down_UPRI.shape[:3])
        low_TUPR = low_TUPR * is_own_TU[:, :, None, None]
        up_JN = up_URN.flatten(0, 1)
        return torch.cat(
            [low_TUPR[:, :, part].flatten(1) @ up_JN[:, first:end] for part, (first, end) in _parts(matrix.starts)],
            dim=1,
        )


def _parts(starts: Sequence[int]) -> list[tuple[int, tuple[int, int]]]:
    return list(enumerate(pairwise(starts)))


def _empty(
    config: DecoderConfig, name: str, num_slots: int, rank: int, dtype: torch.dtype, device: torch.device
) -> SlotMatrix:
    rows = MATRICES[name]
    starts = tuple(accumulate((row.rows(config) for row in rows), initial=0))
    down = torch.zeros(num_slots, len(rows), rank, rows[0].columns(config), dtype=dtype, device=device)
    return SlotMatrix(down, torch.zeros(num_slots, rank, starts[-1], dtype=dtype, device=device), starts)
