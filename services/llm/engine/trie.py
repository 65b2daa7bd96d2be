"""The catalogue as a trie on the device: which codes may follow a prefix, and which items end there.

A *node* of depth d is a distinct prefix of d codes; the root is the node of depth 0. Below the last level come the items
themselves, so that items that share a code stay apart. Nodes are numbered by their smallest item index, and items by
their index: a smaller number wins a tie. Children are stored in one array per level, sorted by parent, with offsets (CSR).
It knows nothing of tokens beyond each level's first one, and nothing of scores.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ItemCodes:
    """A catalogue's codes as plain arrays: `codes` (num_items, depth) int, each level's size and first token."""

    codes: np.ndarray
    level_sizes: tuple[int, ...]
    token_offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """Codes of one level. `starts` (num_parents + 1,), `children` and `codes` (num_children,) are int64, sorted by parent, then child.

    `max_children` is the most that one parent has; `token_offset` and `size` bound the level's token range.
    """

    starts: Tensor
    children: Tensor
    codes: Tensor
    code_of_child: Tensor
    max_children: int
    token_offset: int
    size: int


class Alive(NamedTuple):
    """A mask (num_children,) bool over the nodes after one level, and how many are alive."""

    mask_C: Tensor
    num_alive: int


class Trie:
    """The levels of one catalogue, and the host-side map from items to nodes that masks need."""

    def __init__(self, items: ItemCodes, device: torch.device) -> None:
        codes = np.asarray(items.codes, dtype=np.int64)
        self.num_items, self.depth = codes.shape
        self.device = device
        self._node_of_item = [np.zeros(self.num_items, dtype=np.int64)]
        for level in range(self.depth - 1):
            pairs = self._node_of_item[-1] * items.level_sizes[level] + codes[:, level]
            self._node_of_item.append(_number_by_first_item(pairs))
        self._node_of_item.append(np.arange(self.num_items))
        self.levels = tuple(
            _build_level(
                parents=self._node_of_item[level],
                children=self._node_of_item[level + 1],
                codes=codes[:, level],
                token_offset=items.token_offsets[level],
                size=items.level_sizes[level],
                device=device,
            )
            for level in range(self.depth)
        )

    def alive_by_level(self, allowed: np.ndarray) -> tuple[Alive, ...]:
        """For each level, which of the nodes after it (after the last: items) lead to an allowed item. `allowed` is (num_items,) bool."""
        masks = []
        for nodes, level in zip(self._node_of_item[1:-1], self.levels, strict=False):
            alive = np.zeros(len(level.children), dtype=bool)
            alive[nodes[allowed]] = True
            masks.append(alive)
        masks.append(allowed.copy())
        return tuple(Alive(torch.from_numpy(mask).to(self.device), int(mask.sum())) for mask in masks)


def _number_by_first_item(keys: np.ndarray) -> np.ndarray:
    """Replace equal keys by one number, numbered by where each first occurs."""
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse]


def _build_level(
    *, parents: np.ndarray, children: np.ndarray, codes: np.ndarray, token_offset: int, size: int, device: torch.device
) -> Level:
    child_ids, first = np.unique(children, return_index=True)
    parent_of, code_of = parents[first], codes[first]
    order = np.lexsort((child_ids, parent_of))
    counts = np.bincount(parent_of)
    starts = np.concatenate(([0], np.cumsum(counts)))

    def on_device(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return Level(
        starts=on_device(starts),
        children=on_device(child_ids[order]),
        codes=on_device(code_of[order]),
        code_of_child=on_device(code_of),
        max_children=int(counts.max()),
        token_offset=token_offset,
        size=size,
    )
