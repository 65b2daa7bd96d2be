"""Masks of one request over the trie: the nodes that lead to an allowed item.

Allowed = catalogue AND filters AND NOT excluded. Filters repeat between requests, excluded items do not. So a filter's
mask is computed once (its *base*: for each node the number of allowed items below it), and the cost of a request is
proportional to its excluded items: a node is cleared when its last allowed item is excluded. Masks are bits on the
device: child c is bit c % 8 of byte c // 8.

Shape suffixes: C nodes or items after a level, X = C / 8 bytes, N excluded items.
"""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from services.llm.engine.beam.trie import Trie
from services.llm.engine.device import to_device
from services.llm.engine.sequence import Sequence, Work

_MAX_BASES = 16


@dataclass(frozen=True, slots=True, eq=False)
class ItemMask:
    """For each level, the allowed nodes after it (after the last level: items) as bits (X,) uint8, and their count."""

    bits_by_level: tuple[Tensor, ...]
    num_by_level: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankWork(Work):
    """The search space of a ranking request.

    `width_by_level[l]` is the number of nodes (last level: items) that level l keeps.
    """

    item_mask: ItemMask
    width_by_level: tuple[int, ...]

    def to(self, device: str) -> "RankWork":
        """Return the work on another device."""
        bits = tuple(bits_X.to(device) for bits_X in self.item_mask.bits_by_level)
        return RankWork(item_mask=ItemMask(bits, self.item_mask.num_by_level), width_by_level=self.width_by_level)

    @classmethod
    def of(cls, sequence: Sequence) -> "RankWork":
        """Return the work of a ranking."""
        assert isinstance(sequence.work, cls), "only rankings have levels"
        return sequence.work


@dataclass(frozen=True, slots=True, eq=False)
class _Base:
    """One filter's mask.

    For all levels but the last, the allowed items below each node (C,) int32; the bits on host and device.
    """

    counts_by_level: tuple[np.ndarray, ...]
    host_bits_by_level: tuple[np.ndarray, ...]
    mask: ItemMask


class ItemMasks:
    """Builds the item masks of one catalogue and caches the bases of the most recently used filters."""

    def __init__(self, trie: Trie) -> None:
        self._trie = trie
        self._bases: OrderedDict[bytes, _Base] = OrderedDict()
        self._everything = self._build(np.ones(trie.num_items, dtype=bool))
        self._last: tuple[np.ndarray | None, _Base] = (None, self._everything)

    def of(self, allowed: np.ndarray | None, excluded: np.ndarray) -> ItemMask:
        """Return the mask of the `allowed` items (num_items,) bool, None for all, minus the `excluded` items (N,) int.

        If the same `allowed` array is passed again, its content must be unchanged: it is not read again.
        """
        base = self._everything if allowed is None else self._base(allowed)
        return self._without(base, excluded) if len(excluded) else base.mask

    def _base(self, allowed: np.ndarray) -> _Base:
        last, base = self._last
        if last is not allowed:
            base = self._base_of(allowed)
            self._last = (allowed, base)
        return base

    def _base_of(self, allowed: np.ndarray) -> _Base:
        key = np.packbits(allowed).tobytes()
        base = self._bases.pop(key, None) or self._build(allowed)
        self._bases[key] = base
        if len(self._bases) > _MAX_BASES:
            self._bases.popitem(last=False)
        return base

    def _build(self, allowed: np.ndarray) -> _Base:
        trie = self._trie
        items = np.flatnonzero(allowed)
        counts = tuple(
            np.bincount(nodes[items], minlength=level.num_children).astype(np.int32)
            for nodes, level in zip(trie.nodes_of_items[1:], trie.levels, strict=False)
        )
        masks = [count > 0 for count in counts] + [allowed]
        host_bits = tuple(np.packbits(mask, bitorder="little") for mask in masks)
        bits = tuple(to_device(packed, trie.device) for packed in host_bits)
        return _Base(counts, host_bits, ItemMask(bits, tuple(int(mask.sum()) for mask in masks)))

    def _without(self, base: _Base, excluded: np.ndarray) -> ItemMask:
        items = np.unique(excluded)
        items = items[(base.host_bits_by_level[-1][items >> 3] >> (items & 7)) & 1 > 0]
        cleared_by_level = [
            _cleared_nodes(count, nodes[items])
            for count, nodes in zip(base.counts_by_level, self._trie.nodes_of_items[1:], strict=True)
        ]
        cleared_by_level.append(items)
        bits = [
            _without_bits(on_device, on_host, cleared)
            for on_device, on_host, cleared in zip(
                base.mask.bits_by_level, base.host_bits_by_level, cleared_by_level, strict=True
            )
        ]
        nums = [num - len(cleared) for num, cleared in zip(base.mask.num_by_level, cleared_by_level, strict=True)]
        return ItemMask(tuple(bits), tuple(nums))


def _cleared_nodes(counts_C: np.ndarray, nodes_N: np.ndarray) -> np.ndarray:
    """Return the nodes, in order, that lose all their allowed items when the items at `nodes_N` are excluded."""
    nodes, num_excluded = np.unique(nodes_N, return_counts=True)
    cleared: np.ndarray = nodes[counts_C[nodes] == num_excluded]
    return cleared


def _without_bits(bits_X: Tensor, host_bits_X: np.ndarray, cleared: np.ndarray) -> Tensor:
    """Return a copy of the bits with the distinct, sorted positions `cleared` set to zero."""
    if not len(cleared):
        return bits_X
    byte_index, first = np.unique(cleared >> 3, return_index=True)
    cleared_bits = np.bitwise_or.reduceat((1 << (cleared & 7)).astype(np.uint8), first)
    left = host_bits_X[byte_index] & ~cleared_bits
    device = bits_X.device
    return bits_X.index_copy(0, to_device(byte_index.astype(np.int64), device), to_device(left, device))
