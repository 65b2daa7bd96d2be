"""The beams' own keys and values: one short dense tail beside each beam's shared pages.

Shape suffixes: B beams, Y layers, L places of a tail, G key/value heads, K head size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Tails:
    """The beams are the last B rows of a step. `place_B` is where the step's keys and values go, `seen_BL` what each beam then sees."""

    keys_YBLGK: Tensor
    values_YBLGK: Tensor
    place_B: Tensor
    seen_BL: Tensor

    def write(self, layer: int, k_BGK: Tensor, v_BGK: Tensor) -> None:
        """Put the step's keys and values in their places."""
        row_B = torch.arange(len(k_BGK), device=k_BGK.device)
        self.keys_YBLGK[layer][row_B, self.place_B] = k_BGK
        self.values_YBLGK[layer][row_B, self.place_B] = v_BGK
