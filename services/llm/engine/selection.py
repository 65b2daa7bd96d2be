"""Which candidates a level keeps: the best by score, ties by the smaller number. Fixed shapes, no host sync, any device.

Who is alive is told in bits: see `survivors.py`.

Shape suffixes: R requests, B beams, S codes of the level, C candidates, X bytes of bits, N chosen.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from services.llm.engine.trie import Level

_LOW_BITS = 0xFFFF_FFFF
_NOBODY = -1


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
    keys = (ordered << 32) | (_LOW_BITS - number_RC.long())
    return keys.topk(count, dim=-1).indices


def choose_first(level: Level, logp_RS: Tensor, bits_RX: Tensor, count: int) -> Chosen:
    """Choose among all children of the root. They are numbered 0 to C-1, so no lookup is needed."""
    alive_RC = _unpacked(bits_RX, level.num_children)
    score_RC = logp_RS[:, level.codes].masked_fill_(~alive_RC, -torch.inf)
    places = top_by_score(score_RC, level.children, min(count, score_RC.shape[-1]))
    return Chosen(torch.zeros_like(places), places, score_RC.gather(-1, places))


def choose_next(
    level: Level, node_RB: Tensor, score_RB: Tensor, logp_RBS: Tensor, bits_RX: Tensor, count: int
) -> Chosen:
    """Choose among all children of all beams. A beam with score -inf is padding. The level's shape alone decides how they are found."""
    child_RBC, score_RBC = (_dense_children if level.table_PS is not None else _sparse_children)(
        level, node_RB, logp_RBS
    )
    child_RC = child_RBC.flatten(1)
    score_RC = (
        score_RBC.add_(score_RB.unsqueeze(-1)).flatten(1).masked_fill_(~_are_alive(bits_RX, child_RC), -torch.inf)
    )
    places = top_by_score(score_RC, child_RC, min(count, score_RC.shape[-1]))
    parents = places // child_RBC.shape[-1]
    return Chosen(parents, child_RC.gather(-1, places).long(), score_RC.gather(-1, places))


def _dense_children(level: Level, node_RB: Tensor, logp_RBS: Tensor) -> tuple[Tensor, Tensor]:
    """Give one place for each code, and its score."""
    assert level.table_PS is not None
    return level.table_PS[node_RB], logp_RBS.clone()


def _sparse_children(level: Level, node_RB: Tensor, logp_RBS: Tensor) -> tuple[Tensor, Tensor]:
    """Give as many places as the widest parent has children, and their scores."""
    start_RB1 = level.starts[node_RB].unsqueeze(-1)
    num_RB1 = level.starts[node_RB + 1].unsqueeze(-1) - start_RB1
    reach = torch.arange(level.max_children, device=node_RB.device, dtype=torch.int32)
    place_RBC = (start_RB1 + reach).clamp_max_(level.num_children - 1)
    child_RBC = level.children[place_RBC].masked_fill_(reach >= num_RB1, _NOBODY)
    return child_RBC, logp_RBS.gather(-1, level.codes[place_RBC].long())


def _are_alive(bits_RX: Tensor, child_RC: Tensor) -> Tensor:
    byte_RC = bits_RX.gather(-1, (child_RC >> 3).clamp_min_(0).long())
    return ((byte_RC >> (child_RC & 7)) & 1).bool() & (child_RC >= 0)


def _unpacked(bits_RX: Tensor, num_children: int) -> Tensor:
    place_8 = torch.arange(8, device=bits_RX.device, dtype=torch.uint8)
    return ((bits_RX.unsqueeze(-1) >> place_8) & 1).flatten(1)[:, :num_children].bool()
