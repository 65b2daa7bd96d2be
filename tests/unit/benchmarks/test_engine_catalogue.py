"""The item mask of the peers' beams, against a search through all items."""

import itertools

import numpy as np
import pytest
import torch

from benchmarks.engine.cases import CodeTable, code_table
from benchmarks.engine.catalogue import CodeTrie, mask_scores

TABLE = code_table(30)
"""Ten codes a level."""


def allowed_slowly(table: CodeTable, prefix: list[int]) -> list[bool]:
    """Return for each code whether it continues some item with this prefix."""
    level = len(prefix)
    following = {int(code[level]) for code in table.codes if code[:level].tolist() == prefix}
    return [code in following for code in range(table.level_size)]


@pytest.mark.parametrize("level", [0, 1, 2])
def test_allowed_codes_are_those_of_some_item(level: int) -> None:
    """The mask of every prefix is that of the search; tokens map back to their codes."""
    trie = CodeTrie(TABLE)
    prefixes = list(itertools.product(range(TABLE.level_size), repeat=level))
    tokens_BL = np.array(prefixes).reshape(len(prefixes), level) + np.array(TABLE.token_offsets[:level], dtype=int)

    allowed_BS = trie.allowed(tokens_BL.astype(np.int64))

    tokens = (TABLE.codes[:3] + np.array(TABLE.token_offsets)).tolist()
    assert trie.codes_of(tokens) == TABLE.codes[:3].tolist()
    assert allowed_BS.tolist() == [allowed_slowly(TABLE, list(prefix)) for prefix in prefixes]


def test_scores_are_log_probabilities_over_the_level() -> None:
    """Scores are normalised before the mask, as in our engine; no token outside the level remains."""
    trie = CodeTrie(TABLE)
    scores_BV = torch.randn(2, 33, generator=torch.Generator().manual_seed(0))
    tokens_BL = np.array([[TABLE.token_offsets[0] + 1], [TABLE.token_offsets[0] + 2]])

    masked_BV = mask_scores(trie, tokens_BL, scores_BV)

    first = TABLE.token_offsets[1]
    expected_BS = scores_BV[:, first : first + 10].log_softmax(-1)
    allowed_BS = torch.from_numpy(trie.allowed(tokens_BL))
    assert torch.equal(masked_BV[:, first : first + 10][allowed_BS], expected_BS[allowed_BS])
    assert int(masked_BV.isfinite().sum()) == int(allowed_BS.sum())
