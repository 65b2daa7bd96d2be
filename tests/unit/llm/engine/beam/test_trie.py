"""The trie against the codes that it was built from."""

import numpy as np
import pytest
import torch

from services.llm.engine.beam.trie import ItemCodes, Trie


def build_trie(depth: int) -> tuple[Trie, np.ndarray]:
    """Build a trie of 300 random codes over levels of 7."""
    codes = np.random.default_rng(depth).integers(0, 7, (300, depth))
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


def test_a_small_catalogue_in_a_large_code_space_stays_sparse() -> None:
    """Memory follows the number of items, not the space of codes."""
    codes = np.random.default_rng(0).integers(0, 4_096, (500, 3))
    trie = Trie(ItemCodes(codes=codes, level_sizes=(4_096,) * 3, token_offsets=(1, 4_097, 8_193)), torch.device("cpu"))

    assert trie.num_bytes < 60 * 500
