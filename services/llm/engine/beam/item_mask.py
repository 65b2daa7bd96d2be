"""Which nodes of a trie lead to an item that a request may show, and how many: catalogue AND filters AND NOT seen.

Filters repeat from request to request, what a user has seen does not. So a filter's mask over all items is worked out
once (its *base*: for each node how many allowed items lie below it), and a request pays for the items it leaves out alone: a
node dies with the last of its items. Masks lie on the device as bits, child c in bit c % 8 of byte c // 8.

Shape suffixes: C nodes or items after a level, X = C / 8 bytes, N items left out.
"""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from services.llm.engine.beam.trie import Trie
from services.llm.engine.forward.transfer import to_device

_MAX_BASES = 16


@dataclass(frozen=True, slots=True, eq=False)
class ItemMask:
    """For each level, which nodes after it (after the last: items) are alive, as bits (X,) uint8, and how many."""

    bits_by_level: tuple[Tensor, ...]
    num_by_level: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Base:
    """One filter's mask: allowed items below each node (C,) int32, the last level apart, and the bits on host and device."""

    counts_by_level: tuple[np.ndarray, ...]
    host_bits_by_level: tuple[np.ndarray, ...]
    survivors: ItemMask


class SurvivorMasks:
    """The masks of one catalogue's requests, with the bases of the filters used last."""

    def __init__(self, trie: Trie) -> None:
        self._trie = trie
        self._bases: OrderedDict[bytes, _Base] = OrderedDict()
        self._everything = self._build(np.ones(trie.num_items, dtype=bool))

    def of(self, allowed: np.ndarray | None, excluded: np.ndarray) -> ItemMask:
        """Mask what is `allowed` (num_items,) bool, None for everything, without the items `excluded` (N,) int, in any order."""
        base = self._everything if allowed is None else self._base(allowed)
        return self._without(base, excluded) if len(excluded) else base.survivors

    def _base(self, allowed: np.ndarray) -> _Base:
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
        dead_by_level = [
            _emptied(count, nodes[items])
            for count, nodes in zip(base.counts_by_level, self._trie.nodes_of_items[1:], strict=True)
        ]
        dead_by_level.append(items)
        bits = [
            _cleared(on_device, on_host, dead)
            for on_device, on_host, dead in zip(
                base.survivors.bits_by_level, base.host_bits_by_level, dead_by_level, strict=True
            )
        ]
        nums = [num - len(dead) for num, dead in zip(base.survivors.num_by_level, dead_by_level, strict=True)]
        return ItemMask(tuple(bits), tuple(nums))


def _emptied(counts_C: np.ndarray, nodes_N: np.ndarray) -> np.ndarray:
    """Return the nodes, in order, whose every allowed item is among those at `nodes_N`."""
    nodes, lost = np.unique(nodes_N, return_counts=True)
    emptied: np.ndarray = nodes[counts_C[nodes] == lost]
    return emptied


def _cleared(bits_X: Tensor, host_bits_X: np.ndarray, dead: np.ndarray) -> Tensor:
    """Copy the bits with those of `dead`, distinct and in order, set to zero."""
    if not len(dead):
        return bits_X
    place, first = np.unique(dead >> 3, return_index=True)
    cleared = np.bitwise_or.reduceat((1 << (dead & 7)).astype(np.uint8), first)
    left = host_bits_X[place] & ~cleared
    device = bits_X.device
    return bits_X.index_copy(0, to_device(place.astype(np.int64), device), to_device(left, device))
