"""The catalogue as a trie on the device: which codes may follow a prefix, and which items end there.

A *node* of depth d is a distinct prefix of d codes; the root is the node of depth 0. Items are the children of the last
level's nodes, so that items with the same code stay distinct. Nodes are numbered by their smallest item index, and
items by their index: the smaller number wins a tie. Children are stored in one array per level, sorted by parent, with
offsets (CSR); if parents have most of the codes, as in the first levels of a large catalogue, also as a dense table.
The trie does not know masks, and of tokens only the first token of each level.

Shape suffixes: P parents, C children, S codes of the level.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from models.search import OWN_SEARCH, Scores, Search

_DENSE_SHARE = 2
"""A level is dense if its table is at most this many times as wide as the widest row of the CSR form ..."""
_DENSE_ENTRIES = 1 << 20
"""... and has at most this many entries of 4 bytes."""
_EXACT_WIDTHS = 4_096
"""The bound on the number of children is exact for up to this many beams."""


class CodedItems(Protocol):
    """The part of `models.catalogue.Catalogue` that a search reads; the engine imports no table reader."""

    @property
    def codes(self) -> np.ndarray:
        """Codes (num_items, depth) int."""
        ...

    @property
    def level_sizes(self) -> tuple[int, ...]: ...

    @property
    def token_offsets(self) -> tuple[int, ...]:
        """First token of each level."""
        ...

    @property
    def popularity(self) -> np.ndarray:
        """Training events of each item (num_items,)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ItemCodes:
    """A catalogue's codes as plain arrays: `codes` (num_items, depth) int, each level's size and first token.

    `scores` are the tokens among which log-probabilities are normalised. `tie_ranks` (num_items,) orders items of equal
    score, smallest first; None: by index.
    """

    codes: np.ndarray
    level_sizes: tuple[int, ...]
    token_offsets: tuple[int, ...]
    scores: Scores = "catalogue"
    tie_ranks: np.ndarray | None = None

    @classmethod
    def of(cls, catalogue: CodedItems, search: Search = OWN_SEARCH) -> "ItemCodes":
        """Return a catalogue's codes as a bundle searches them; closing tokens are levels of size 1."""
        num_items, num_closing = len(catalogue.codes), len(search.close)
        ranks = None
        if search.popular_first:
            ranks = np.empty(num_items, dtype=np.int64)
            ranks[np.argsort(-catalogue.popularity, kind="stable")] = np.arange(num_items)
        closing = np.zeros((num_items, num_closing), dtype=catalogue.codes.dtype)
        return cls(
            codes=np.concatenate([catalogue.codes, closing], axis=1) if num_closing else catalogue.codes,
            level_sizes=(*catalogue.level_sizes, *(1,) * num_closing),
            token_offsets=(*catalogue.token_offsets, *search.close),
            scores=search.scores,
            tie_ranks=ranks,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """Codes of one level. `starts` (num_parents + 1,), `children` and `codes` are int32, sorted by parent, then child.

    `code_of_child` is empty at the last level, whose children are items. `table_PS` is the child of each parent and
    code, -1 for none, if the level is dense. `max_children` is the maximum per parent, `most_by_width[w]` the maximum
    of w + 1 parents together; `token_offset` and `size` bound the level's token range. Scores are normalised over a
    node's children if `over_children`, otherwise over the vocabulary. `tie_rank` orders children of equal score; None:
    by number.
    """

    starts: Tensor
    children: Tensor
    codes: Tensor
    code_of_child: Tensor
    table_PS: Tensor | None
    max_children: int
    most_by_width: np.ndarray
    token_offset: int
    size: int
    over_children: bool = True
    tie_rank: Tensor | None = None

    def most_children(self, width: int) -> int:
        """Return an upper bound of the number of children of `width` different parents."""
        return int(self.most_by_width[width - 1]) if width <= len(self.most_by_width) else self.num_children

    @property
    def num_children(self) -> int:
        """Number of nodes, or items, after this level."""
        return len(self.children)

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        tensors = (self.starts, self.children, self.codes, self.code_of_child, self.table_PS, self.tie_rank)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class Trie:
    """The levels of one catalogue.

    `nodes_of_items[l]` (num_items,) int32, on the host, are the nodes before level l.
    """

    def __init__(self, items: ItemCodes, device: torch.device) -> None:
        self.num_items, self.depth = items.codes.shape
        self.device = device
        self.nodes_of_items = _number_nodes(items)
        children = (*self.nodes_of_items[1:], np.arange(self.num_items, dtype=np.int32))
        self.levels = tuple(
            _build_level(
                parents=self.nodes_of_items[level],
                children=children[level],
                codes=items.codes[:, level],
                is_last=level == self.depth - 1,
                token_offset=items.token_offsets[level],
                size=items.level_sizes[level],
                device=device,
                over_children=items.scores == "catalogue",
                tie_ranks=items.tie_ranks if level == self.depth - 1 else None,
            )
            for level in range(self.depth)
        )

    @property
    def num_bytes(self) -> int:
        """Bytes on the device and on the host."""
        return sum(level.num_bytes for level in self.levels) + sum(nodes.nbytes for nodes in self.nodes_of_items)


def _number_nodes(items: ItemCodes) -> tuple[np.ndarray, ...]:
    nodes = [np.zeros(len(items.codes), dtype=np.int32)]
    for level in range(items.codes.shape[1] - 1):
        keys = nodes[-1].astype(np.int64) * items.level_sizes[level] + items.codes[:, level]
        nodes.append(_number_by_first_item(keys))
    return tuple(nodes)


def _number_by_first_item(keys: np.ndarray) -> np.ndarray:
    """Replace equal keys by one number, in order of first occurrence."""
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int32)
    rank[np.argsort(first)] = np.arange(len(first), dtype=np.int32)
    return rank[inverse]


def _build_level(
    *,
    parents: np.ndarray,
    children: np.ndarray,
    codes: np.ndarray,
    is_last: bool,
    token_offset: int,
    size: int,
    device: torch.device,
    over_children: bool = True,
    tie_ranks: np.ndarray | None = None,
) -> Level:
    first_item = _first_places(children)
    parent_of, code_of = parents[first_item], codes[first_item]
    order = np.argsort(parent_of, kind="stable")
    counts = np.bincount(parent_of)

    def on_device(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32)).to(device)

    max_children = int(counts.max())
    is_dense = len(counts) > 1 and not is_last and size <= _DENSE_SHARE * max_children
    table = _table(parent_of, code_of, len(counts), size) if is_dense and len(counts) * size <= _DENSE_ENTRIES else None
    return Level(
        starts=on_device(np.concatenate(([0], np.cumsum(counts)))),
        children=on_device(order),
        codes=on_device(code_of[order]),
        code_of_child=on_device(code_of if not is_last else code_of[:0]),
        table_PS=on_device(table) if table is not None else None,
        max_children=max_children,
        most_by_width=np.cumsum(-np.sort(-counts)[:_EXACT_WIDTHS]),
        token_offset=token_offset,
        size=size,
        over_children=over_children,
        tie_rank=on_device(tie_ranks) if tie_ranks is not None else None,
    )


def _first_places(children: np.ndarray) -> np.ndarray:
    """Return the first item of each child. Children are numbered by it, so each new child has the largest so far."""
    return np.flatnonzero(np.diff(np.maximum.accumulate(children), prepend=-1))


def _table(parent_of: np.ndarray, code_of: np.ndarray, num_parents: int, size: int) -> np.ndarray:
    table = np.full((num_parents, size), -1, dtype=np.int32)
    table[parent_of, code_of] = np.arange(len(parent_of))
    return table
