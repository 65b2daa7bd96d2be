"""Which items a history holds at each of its places, so that learning leaves out what serving would not show. Pure tensors.

Shape suffixes: B histories, L places, T chosen places of all histories, C some of those, V items.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_PENALTY = 1e4
"""What a place of distance takes off the score of what must not be chosen: finite, so that 0 times it is 0."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Which items each token's history holds: those whose first place in its row lies before the token's own place."""

    first_place_BV: Tensor
    row_T: Tensor
    place_T: Tensor

    def penalty(self, rows: slice) -> Tensor:
        """Give (C, V) for these tokens: 0, or far below 0 where seen. Arithmetic, as comparing and filling takes longer."""
        first_CV = self.first_place_BV.index_select(0, self.row_T[rows])
        return first_CV.sub_(self.place_T[rows].unsqueeze(1)).clamp_(max=0).mul_(_PENALTY)


def next_unseen(labels_BL: Tensor, num_items: int) -> tuple[Tensor, Seen]:
    """Choose the places (B, L) bool whose label, an item index, is new to its history, and tell what was seen at each.

    Negative labels are none. A repeat is no lesson here: it would never be shown.
    """
    first_BV = first_places(labels_BL, num_items)
    place_BL = torch.arange(labels_BL.shape[1], dtype=torch.float32).expand_as(labels_BL)
    is_first_BL = first_BV.gather(1, labels_BL.clamp(min=0)) == place_BL
    chosen_BL = (labels_BL >= 0) & is_first_BL
    row_T, _ = chosen_BL.nonzero(as_tuple=True)
    return chosen_BL, Seen(first_BV, row_T, place_BL[chosen_BL])


def first_places(labels_BL: Tensor, num_items: int) -> Tensor:
    """Return the place (B, V) at which each item first is the label, L for those that never are. Negative labels are none."""
    length = labels_BL.shape[1]
    places_BL = torch.arange(length, dtype=torch.float32).expand_as(labels_BL)
    places_BL = places_BL.masked_fill(labels_BL < 0, length)
    never_BV = torch.full((len(labels_BL), num_items), float(length))
    return never_BV.scatter_reduce(1, labels_BL.clamp(min=0), places_BL, "amin")
