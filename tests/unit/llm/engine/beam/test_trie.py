"""The trie against the codes that it was built from."""

import numpy as np
import pytest
import torch

from services.llm.engine.beam.trie import ItemCodes, Trie
from tests.support.engine.engines import build_items


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_walking_the_trie_spells_exactly_the_catalogue(depth) -> None:
    """Every path from the root ends in the item with that code, and each item is reached once."""
    items = build_items(depth, num_items=300)
    trie = Trie(items, torch.device("cpu"))
    paths = {(0, ())}
    for level in trie.levels:
        starts, children, level_codes = level.starts.tolist(), level.children.tolist(), level.codes.tolist()
        paths = {
            (children[edge], (*spelled, level_codes[edge]))
            for node, spelled in paths
            for edge in range(starts[node], starts[node + 1])
        }

    assert sorted(paths) == [(index, tuple(code)) for index, code in enumerate(items.codes.tolist())]


def test_a_small_catalogue_in_a_large_code_space_stays_sparse() -> None:
    """Memory is proportional to the number of items, not to the code space."""
    codes = np.random.default_rng(0).integers(0, 4_096, (500, 3))
    trie = Trie(ItemCodes(codes=codes, level_sizes=(4_096,) * 3, token_offsets=(1, 4_097, 8_193)), torch.device("cpu"))

    assert trie.num_bytes < 60 * 500
