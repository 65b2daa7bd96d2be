"""Selects the candidates that a level keeps: best score first, ties by the smaller rank or number.

Fixed shapes, no host sync, any device. A child's score is its beam's score plus its log-probability among all children
of that beam's node, so the scores of a catalogue's items form one distribution, even if some codes lead to no item.
Where a level is not `over_children`, its logits are already log-probabilities over the vocabulary.
Allowed children are given as bits (see `item_mask.py`) and change no score.

Shape suffixes: R requests, B beams, S codes of the level, C candidates, X bytes of bits, N kept.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from services.llm.engine.beam.trie import Level

_LOW_BITS = 0xFFFF_FFFF
_NO_CHILD = -1
_PADDED_SHARE = 2
"""Children are packed if padding per beam would take more than this many times the candidates."""


class TopK(NamedTuple):
    """The candidates that a level keeps, best first.

    `parent_RN` is a beam's index in its request, `child_RN` a node or an item; score -inf for padding.
    """

    parent_RN: Tensor
    child_RN: Tensor
    score_RN: Tensor


def top_by_score(score_RC: Tensor, number_RC: Tensor, count: int) -> Tensor:
    """Return the indices (R, count) of the highest fp32 scores, ties by the smaller number (0 to 2^32-1).

    Score and number are packed into one integer with the same order, so that a single top-k is exact. Numbers must be
    distinct if the choice between ties matters.
    """
    keys = (ordered_bits(score_RC) << 32) | (_LOW_BITS - number_RC.long())
    return keys.topk(count, dim=-1).indices


def ordered_bits(score: Tensor) -> Tensor:
    """Return int64 numbers from -2^31 to 2^31 - 1 in the order of fp32 scores; equal scores give equal numbers."""
    bits = score.add(0.0).view(torch.int32)  # adding zero turns -0.0 into 0.0
    return (bits ^ ((bits >> 31) & 0x7FFF_FFFF)).long()


def choose_first(level: Level, logits_RS: Tensor, bits_RX: Tensor, count: int) -> TopK:
    """Select among all children of the root. They are numbered 0 to C-1, so no lookup is needed."""
    allowed_RC = _unpacked(bits_RX, level.num_children)
    score_RC = logits_RS[:, level.codes]
    score_RC = (score_RC.log_softmax(-1) if level.over_children else score_RC).masked_fill(~allowed_RC, -torch.inf)
    places = top_by_score(score_RC, _order_of(level, level.children), min(count, score_RC.shape[-1]))
    return TopK(torch.zeros_like(places), places, score_RC.gather(-1, places))


def choose_next(
    level: Level, node_RB: Tensor, score_RB: Tensor, logits_RBS: Tensor, bits_RX: Tensor, count: int
) -> TopK:
    """Select among all children of all beams, whose nodes differ. A beam with score -inf is padding."""
    parent_RC, child_RC, score_RC = _children(level, node_RB, score_RB, logits_RBS)
    score_RC.masked_fill_(~_are_allowed(bits_RX, child_RC), -torch.inf)
    places = top_by_score(score_RC, _order_of(level, child_RC), min(count, score_RC.shape[-1]))
    return TopK(parent_RC.gather(-1, places), child_RC.gather(-1, places).long(), score_RC.gather(-1, places))


def _children(level: Level, node_RB: Tensor, score_RB: Tensor, logits_RBS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the candidates (R, C): beam, child and score; child -1 for an unused candidate. C is static."""
    num_beams = node_RB.shape[1]
    if level.table_PS is not None:
        child_RBC, logits_RBC = level.table_PS[node_RB], logits_RBS
    elif num_beams * level.max_children <= _PADDED_SHARE * level.most_children(num_beams):
        child_RBC, logits_RBC = _padded_children(level, node_RB, logits_RBS)
    else:
        return _packed_children(level, node_RB, score_RB, logits_RBS)
    logp_RBC = logits_RBC.masked_fill(child_RBC < 0, -torch.inf)
    if level.over_children:
        logp_RBC = logp_RBC.log_softmax(-1)
    score_RBC = logp_RBC.add_(score_RB.unsqueeze(-1))
    parent_C = torch.arange(num_beams, device=node_RB.device).repeat_interleave(child_RBC.shape[-1])
    return parent_C.expand(len(node_RB), -1), child_RBC.flatten(1), score_RBC.flatten(1)


def _padded_children(level: Level, node_RB: Tensor, logits_RBS: Tensor) -> tuple[Tensor, Tensor]:
    """Return the children of each beam and their logits, padded to the widest parent's number of children."""
    start_RB1 = level.starts[node_RB].unsqueeze(-1)
    num_RB1 = level.starts[node_RB + 1].unsqueeze(-1) - start_RB1
    reach = torch.arange(level.max_children, device=node_RB.device, dtype=torch.int32)
    place_RBC = (start_RB1 + reach).clamp_max_(level.num_children - 1)
    child_RBC = level.children[place_RBC].masked_fill_(reach >= num_RB1, _NO_CHILD)
    return child_RBC, logits_RBS.gather(-1, level.codes[place_RBC].long())


def _packed_children(
    level: Level, node_RB: Tensor, score_RB: Tensor, logits_RBS: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the beams' children contiguously, in as many candidates as any such beams can have; for uneven codes."""
    num_beams, size = logits_RBS.shape[1:]
    start_RB = level.starts[node_RB]
    num_RB = (level.starts[node_RB + 1] - start_RB).masked_fill_(score_RB == -torch.inf, 0)
    end_RB = num_RB.cumsum(-1)
    slot_C = torch.arange(level.most_children(num_beams), device=node_RB.device)
    slot_RC = slot_C.repeat(len(node_RB), 1)
    parent_RC = torch.searchsorted(end_RB, slot_RC, right=True).clamp_max_(num_beams - 1)
    place_RC = ((start_RB - end_RB + num_RB).gather(-1, parent_RC) + slot_RC).clamp_(0, level.num_children - 1)
    is_used_RC = slot_RC < end_RB[:, -1:]
    child_RC = level.children[place_RC].masked_fill_(~is_used_RC, _NO_CHILD)
    logits_RC = logits_RBS.flatten(1).gather(-1, parent_RC * size + level.codes[place_RC])
    logits_RC.masked_fill_(~is_used_RC, -torch.inf)
    norm_RB = score_RB - _log_sums(logits_RC, parent_RC, end_RB) if level.over_children else score_RB
    return parent_RC, child_RC, logits_RC.add_(norm_RB.gather(-1, parent_RC))


def _log_sums(logits_RC: Tensor, parent_RC: Tensor, end_RB: Tensor) -> Tensor:
    """Return the log-sum-exp of each beam's candidates (R, B), contiguous up to `end_RB`; 0 for a beam without any.

    The sums are differences of a cumulative sum in fp64, of numbers of at most 1; each beam has at least one 1.
    """
    top_RB = torch.full_like(end_RB, -torch.inf, dtype=logits_RC.dtype).scatter_reduce_(
        -1, parent_RC, logits_RC, "amax"
    )
    top_RB.masked_fill_(top_RB == -torch.inf, 0.0)
    running_RC = (logits_RC - top_RB.gather(-1, parent_RC)).double().exp_().cumsum_(-1)
    until_RB = functional.pad(running_RC, (1, 0)).gather(-1, end_RB)
    sum_RB = until_RB.diff(dim=-1, prepend=torch.zeros_like(until_RB[:, :1]))
    return top_RB + sum_RB.clamp_min_(1.0).log_().to(top_RB)


def _order_of(level: Level, child: Tensor) -> Tensor:
    """Return the sort keys of children with equal scores."""
    return child if level.tie_rank is None else level.tie_rank[child.clamp_min(0)]


def _are_allowed(bits_RX: Tensor, child_RC: Tensor) -> Tensor:
    byte_RC = bits_RX.gather(-1, (child_RC >> 3).clamp_min_(0).long())
    return ((byte_RC >> (child_RC & 7)) & 1).bool() & (child_RC >= 0)


def _unpacked(bits_RX: Tensor, num_children: int) -> Tensor:
    place_8 = torch.arange(8, device=bits_RX.device, dtype=torch.uint8)
    return ((bits_RX.unsqueeze(-1) >> place_8) & 1).flatten(1)[:, :num_children].bool()
