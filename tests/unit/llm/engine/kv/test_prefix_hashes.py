"""Block hashes: equal exactly when version, position and all tokens up to the block's end are equal."""

from services.llm.engine.kv.prefix_hashes import PrefixHasher


def hashes_of(tokens: list[int], version: str = "v1") -> list[bytes]:
    """Return the hashes of the full blocks of 4 tokens."""
    hashes: list[bytes] = []
    PrefixHasher(version, 4).extend(hashes, tokens)
    return hashes


def test_only_full_blocks_have_hashes() -> None:
    """Tokens that fill no block have no hash."""
    assert [len(hashes_of(list(range(count)))) for count in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_a_hash_covers_everything_before_it() -> None:
    """A change of a token changes its block's hash and all later ones, and none before it."""
    base = hashes_of([1, 2, 3, 4, 5, 6, 7, 8])

    assert not set(base) & set(hashes_of([9, 2, 3, 4, 5, 6, 7, 8]))
    assert hashes_of([1, 2, 3, 4, 5, 6, 7, 9])[0] == base[0]
    assert hashes_of([1, 2, 3, 4, 5, 6, 7, 9])[1] != base[1]


def test_the_same_block_at_another_position_has_another_hash() -> None:
    """Position matters, since keys are rotated by it."""
    first, second = hashes_of([1, 2, 3, 4, 1, 2, 3, 4])

    assert first != second


def test_hashing_continues_where_it_stopped() -> None:
    """Hashing a growing sequence step by step equals hashing it at once."""
    hasher, hashes = PrefixHasher("v1", 4), []
    for count in range(20):
        hasher.extend(hashes, list(range(count)))

    assert hashes == hashes_of(list(range(19)))


def test_versions_share_no_hash() -> None:
    """Other weights have other hashes."""
    assert hashes_of([1, 2, 3, 4]) != hashes_of([1, 2, 3, 4], "v2")
