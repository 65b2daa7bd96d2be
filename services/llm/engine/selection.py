"""Which candidates a level keeps: the best by score, ties by the smaller number. Fixed shapes, no host sync, any device.

Shape suffixes: R requests, B beams, S codes of the level, C candidates, N chosen.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from services.llm.engine.trie import Level

_LOW_BITS = 0xFFFF_FFFF


class Chosen(NamedTuple):
    """What a level chose, best first: `parent_RN` is a beam's place in its request, `child_RN` a node or an item, -inf marks none."""

    parent_RN: Tensor
    child_RN: Tensor
    score_RN: Tensor


def top_by_score(score_RC: Tensor, number_RC: Tensor, count: int) -> Tensor:
    """Give the places (R, count) of the highest fp32 scores, ties by the smaller number (0 to 2^32-1, distinct where it matters).

    Both are packed into one integer that orders the same, so that one top-k is exact.
    """
    bits = score_RC.add(0.0).view(torch.int32)  # adding zero turns -0.0 into 0.0
    ordered = (bits ^ ((bits >> 31) & 0x7FFF_FFFF)).long()
    keys = (ordered << 32) | (_LOW_BITS - number_RC)
    return keys.topk(count, dim=-1).indices


def choose_first(level: Level, logp_RS: Tensor, alive_RC: Tensor, count: int) -> Chosen:
    """Choose among all children of the root. They are numbered 0 to C-1, so no lookup is needed."""
    score_RC = logp_RS[:, level.codes].masked_fill_(~alive_RC, -torch.inf)
    places = top_by_score(score_RC, level.children, min(count, score_RC.shape[-1]))
    return Chosen(torch.zeros_like(places), places, score_RC.gather(-1, places))


def choose_next(
    level: Level, node_RB: Tensor, score_RB: Tensor, logp_RBS: Tensor, alive_RC: Tensor, count: int
) -> Chosen:
    """Choose among all children of all beams. A beam with score -inf is padding."""
    start_RB = level.starts[node_RB]
    num_RB = level.starts[node_RB + 1] - start_RB
    reach = torch.arange(level.max_children, device=node_RB.device)
    place_RBC = (start_RB.unsqueeze(-1) + reach).clamp_max_(len(level.children) - 1)
    child_RBC = level.children[place_RBC]
    score_RBC = score_RB.unsqueeze(-1) + logp_RBS.gather(-1, level.codes[place_RBC])
    alive_RBC = alive_RC.gather(-1, child_RBC.flatten(1)).view_as(child_RBC) & (reach < num_RB.unsqueeze(-1))
    score_RC = score_RBC.masked_fill_(~alive_RBC, -torch.inf).flatten(1)
    child_RC = child_RBC.flatten(1)
    places = top_by_score(score_RC, child_RC, min(count, score_RC.shape[-1]))
    return Chosen(places // level.max_children, child_RC.gather(-1, places), score_RC.gather(-1, places))
