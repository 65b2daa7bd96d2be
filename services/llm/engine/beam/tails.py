"""The beams' own keys and values: a short dense tail per beam, in addition to the request's shared blocks.

Shape suffixes: B beams, Y layers, L slots of a tail, G key/value heads, K head size.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


class TailCells(NamedTuple):
    """One layer's tails (B, L, G, K) and the cells that a step's keys and values are written to."""

    keys_BLGK: Tensor
    values_BLGK: Tensor
    cell_B: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Tails:
    """The tails of a step's last B rows, which are the beams.

    `place_B` is the slot of the step's keys and values, `seen_BL` the slots that each beam then attends to.
    """

    keys_YBLGK: Tensor
    values_YBLGK: Tensor
    place_B: Tensor
    seen_BL: Tensor
    cell_B: Tensor = field(init=False, repr=False)
    """The flat index of the written slots, row * L + slot."""

    def __post_init__(self) -> None:
        """Compute the index once for all layers."""
        row_B = torch.arange(len(self.place_B), device=self.place_B.device)
        object.__setattr__(self, "cell_B", row_B * self.keys_YBLGK.shape[2] + self.place_B)

    def layer(self, layer: int) -> TailCells:
        """Return one layer's memory, for kernels that write directly."""
        return TailCells(self.keys_YBLGK[layer], self.values_YBLGK[layer], self.cell_B)

    def write(self, layer: int, k_BGK: Tensor, v_BGK: Tensor) -> None:
        """Store the step's keys and values in their slots."""
        for tail_YBLGK, x_BGK in ((self.keys_YBLGK, k_BGK), (self.values_YBLGK, v_BGK)):
            tail_YBLGK[layer].view(-1, *x_BGK.shape[1:]).index_copy_(0, self.cell_B, x_BGK)
