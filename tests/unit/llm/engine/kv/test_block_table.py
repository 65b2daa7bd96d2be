"""Block tables: blocks needed by a sequence, checked position by position, and the hashes of the prefix cache."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from models.decoder.window import Window
from services.llm.engine.config import EngineConfig
from services.llm.engine.kv.block_table import BlockNeed, PrefixHasher

BLOCK = 4
windows = st.builds(Window, st.integers(1, 30), st.just(frozenset({0})), st.integers(0, 9))


def build_need(window: Window | None, chunk: int, num_blocks: int = 1_000) -> BlockNeed:
    """Build the counts of an engine with small blocks."""
    config = EngineConfig(block_tokens=BLOCK, tile_tokens=BLOCK, max_chunk_tokens=chunk, num_blocks=num_blocks)
    return BlockNeed(config, window)


def sees(window: Window, row: int, position: int) -> bool:
    """Return whether a row sees a position, by the window's definition."""
    return position <= row and (position < window.num_sinks or position > row - window.size)


@given(window=windows, num_computed=st.integers(0, 120))
def test_blocks_behind_are_those_that_no_later_row_sees(window: Window, num_computed: int) -> None:
    """Blocks that a later row sees are kept, and all other blocks before the next token's block are freed."""
    need = build_need(window, chunk=7)
    behind = set(range(200)[need.behind(num_computed)])

    seen = {
        position // BLOCK
        for row in range(num_computed, num_computed + 40)
        for position in range(row + 1)
        if sees(window, row, position)
    }

    passed = set(range(num_computed // BLOCK))
    sinks = set(range(-(-window.num_sinks // BLOCK)))
    assert behind == passed - seen - sinks
    assert need.first_visible(num_computed) >= max(behind, default=-1) + 1


@given(window=windows, chunk=st.integers(1, 20), num_tokens=st.integers(1, 200))
def test_a_table_has_places_for_the_next_chunk_and_no_more_held_than_promised(
    window: Window, chunk: int, num_tokens: int
) -> None:
    """The longest chunk always fits, and a pool of the maximum number of held blocks suffices for any length."""
    need = build_need(window, chunk)
    held = 0

    for num_computed in range(num_tokens):
        places = need.table_len(num_computed, num_tokens)
        assert places * BLOCK >= min(num_tokens, num_computed + chunk)
        assert places >= need.table_len(max(num_computed - 1, 0), num_tokens)
        if window.start(num_computed) > -(-window.num_sinks // BLOCK) * BLOCK:
            assert places <= (num_computed + chunk - 1) // BLOCK + 2, "at most one block more than this chunk needs"
        held = max(held, places - len(range(places)[need.behind(num_computed)]))

    assert build_need(window, chunk, num_blocks=max(held, 1)).longest(num_tokens) == num_tokens


@given(chunk=st.integers(1, 20), num_computed=st.integers(0, 50), more=st.integers(1, 50))
def test_without_a_window_every_block_is_needed(chunk: int, num_computed: int, more: int) -> None:
    """Without a window all blocks are kept, the table covers all tokens, and the length is limited by the pool."""
    need = build_need(None, chunk, num_blocks=10)

    assert range(100)[need.behind(num_computed)] == range(0)
    assert need.table_len(num_computed, num_computed + more) == -(-(num_computed + more) // BLOCK)
    assert need.longest(num_computed + more) == min(num_computed + more, 40)


def hashes_of(tokens: list[int], version: str = "v1", scope: bytes = b"") -> list[bytes]:
    """Return the hashes of the full blocks of 4 tokens."""
    hashes: list[bytes] = []
    PrefixHasher(version, BLOCK).extend(hashes, tokens, scope)
    return hashes


def test_a_hash_covers_the_version_the_scope_the_position_and_all_tokens_before() -> None:
    """A changed token changes its block's hash and all later hashes; equal blocks at two positions differ."""
    tokens = [1, 2, 3, 4, 1, 2, 3, 4]
    base = hashes_of(tokens)

    assert base[0] != base[1]
    assert not set(base) & set(hashes_of([9, *tokens[1:]]))
    assert not set(base) & set(hashes_of(tokens, "v2"))
    assert not set(base) & set(hashes_of(tokens, scope=b"s"))
    assert not set(hashes_of(tokens[4:])) & set(hashes_of(tokens, scope=np.array(tokens[:4], np.int32).tobytes()))
    changed = hashes_of([*tokens[:7], 9])
    assert changed[0] == base[0]
    assert changed[1] != base[1]


def test_a_growing_sequence_has_the_hashes_of_its_full_blocks() -> None:
    """Hashes extended token by token equal the hashes of all tokens at once."""
    hasher, hashes = PrefixHasher("v1", BLOCK), []
    for count in range(20):
        hasher.extend(hashes, list(range(count)))

        assert len(hashes) == count // 4
    assert hashes == hashes_of(list(range(19)))
