"""The trie against the codes that it was built from."""

import numpy as np
import pytest
import torch

from services.llm.engine.trie import ItemCodes, Trie


def build_trie(depth: int, num_items: int = 300) -> tuple[Trie, np.ndarray]:
    """Build a trie of random codes over levels of 7."""
    codes = np.random.default_rng(depth).integers(0, 7, (num_items, depth))
    offsets = tuple(1 + 7 * level for level in range(depth))
    return Trie(ItemCodes(codes=codes, level_sizes=(7,) * depth, token_offsets=offsets), torch.device("cpu")), codes


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_walking_the_trie_spells_exactly_the_catalogue(depth) -> None:
    """From the root down, every path ends in an item with that code, and every item is reached once."""
    trie, codes = build_trie(depth)
    paths = {(0, ())}
    for level in trie.levels:
        starts, children, level_codes = level.starts.tolist(), level.children.tolist(), level.codes.tolist()
        paths = {
            (children[place], (*spelled, level_codes[place]))
            for node, spelled in paths
            for place in range(starts[node], starts[node + 1])
        }

    assert sorted(paths) == [(index, tuple(code)) for index, code in enumerate(codes.tolist())]


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_nodes_are_numbered_by_their_smallest_item(depth) -> None:
    """Going through the items in order, new prefixes appear in the order of their numbers."""
    trie, codes = build_trie(depth)

    for nodes, length in zip(trie._node_of_item[1:-1], range(1, depth), strict=True):
        prefixes = list(dict.fromkeys(map(tuple, codes[:, :length].tolist())))
        assert nodes.tolist() == [prefixes.index(tuple(code)) for code in codes[:, :length].tolist()]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
def test_a_node_is_alive_when_an_allowed_item_is_below_it(share) -> None:
    """Masks and their counts follow from the allowed items alone."""
    trie, codes = build_trie(3)
    allowed = np.random.default_rng(8).random(300) < share

    alive = trie.alive_by_level(allowed)

    for length, (mask, count) in zip((1, 2), alive, strict=False):
        prefixes = list(dict.fromkeys(map(tuple, codes[:, :length].tolist())))
        living = {tuple(code) for code in codes[allowed][:, :length].tolist()}
        assert mask.tolist() == [prefix in living for prefix in prefixes]
        assert count == len(living)
    assert alive[-1].mask_C.tolist() == allowed.tolist()
