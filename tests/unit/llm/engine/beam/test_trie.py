"""The trie against the codes that it was built from."""

import numpy as np
import pytest
import torch

from services.llm.engine.beam.trie import ItemCodes, Trie


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

    for nodes, length in zip(trie.nodes_of_items[1:], range(1, depth), strict=True):
        prefixes = list(dict.fromkeys(map(tuple, codes[:, :length].tolist())))
        assert nodes.tolist() == [prefixes.index(tuple(code)) for code in codes[:, :length].tolist()]


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_a_dense_level_equals_its_csr_form(depth) -> None:
    """Where parents have most of the codes, the table has the same child for each code, and none elsewhere."""
    trie, _ = build_trie(depth, 3_000)
    dense = [level for level in trie.levels if level.table_PS is not None]

    for level in dense:
        starts, children, codes = level.starts.tolist(), level.children.tolist(), level.codes.tolist()
        for parent, row in enumerate(level.table_PS.tolist()):
            found = {codes[place]: children[place] for place in range(starts[parent], starts[parent + 1])}
            assert row == [found.get(code, -1) for code in range(level.size)]
    assert len(dense) == depth - 2


def test_a_small_catalogue_in_a_large_code_space_stays_sparse() -> None:
    """Memory follows the number of items, not the space of codes."""
    codes = np.random.default_rng(0).integers(0, 4_096, (500, 3))
    trie = Trie(ItemCodes(codes=codes, level_sizes=(4_096,) * 3, token_offsets=(1, 4_097, 8_193)), torch.device("cpu"))

    assert trie.num_bytes < 60 * 500
