"""Block hashes: equal exactly when version, position and all tokens up to the block's end are equal."""

from services.llm.engine.kv.block_table import PrefixHasher

TOKENS = [1, 2, 3, 4, 1, 2, 3, 4]


def hashes_of(tokens: list[int], version: str = "v1") -> list[bytes]:
    """Return the hashes of the full blocks of 4 tokens."""
    hashes: list[bytes] = []
    PrefixHasher(version, 4).extend(hashes, tokens)
    return hashes


def test_a_hash_covers_the_version_the_position_and_all_tokens_before() -> None:
    """A change of a token changes its block's hash and all later ones; equal blocks at two positions differ."""
    base = hashes_of(TOKENS)

    assert base[0] != base[1]
    assert not set(base) & set(hashes_of([9, *TOKENS[1:]]))
    assert not set(base) & set(hashes_of(TOKENS, "v2"))
    changed = hashes_of([*TOKENS[:7], 9])
    assert changed[0] == base[0]
    assert changed[1] != base[1]


def test_a_growing_sequence_has_the_hashes_of_its_full_blocks() -> None:
    """Extended token by token, the hashes equal those of all tokens at once."""
    hasher, hashes = PrefixHasher("v1", 4), []
    for count in range(20):
        hasher.extend(hashes, list(range(count)))

        assert len(hashes) == count // 4
    assert hashes == hashes_of(list(range(19)))
