"""The item mask of the peers' beams, against a search through all items."""

import itertools

import numpy as np
import pytest

from benchmarks.engine.cases import CodeTable, code_table
from benchmarks.engine.catalogue import CodeTrie

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
