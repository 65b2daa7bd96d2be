"""Block names: equal exactly when version, position and all tokens up to the block's end are equal."""

from services.llm.engine.kv.prefix_hashes import PrefixHasher


def names_of(tokens: list[int], version: str = "v1") -> list[bytes]:
    """Name the full blocks of 4 tokens."""
    names: list[bytes] = []
    PrefixHasher(version, 4).extend(names, tokens)
    return names


def test_only_full_blocks_have_names() -> None:
    """Tokens that fill no block are not named."""
    assert [len(names_of(list(range(count)))) for count in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_a_name_covers_everything_before_it() -> None:
    """A change in an early token changes all later names; a change in a late one none before it."""
    base = names_of([1, 2, 3, 4, 5, 6, 7, 8])

    assert not set(base) & set(names_of([9, 2, 3, 4, 5, 6, 7, 8]))
    assert names_of([1, 2, 3, 4, 5, 6, 7, 9])[0] == base[0]
    assert names_of([1, 2, 3, 4, 5, 6, 7, 9])[1] != base[1]


def test_the_same_block_at_another_place_has_another_name() -> None:
    """Position matters, since keys are rotated by it."""
    first, second = names_of([1, 2, 3, 4, 1, 2, 3, 4])

    assert first != second


def test_naming_goes_on_where_it_stopped() -> None:
    """Naming a growing sequence piece by piece equals naming it at once."""
    namer, names = PrefixHasher("v1", 4), []
    for count in range(20):
        namer.extend(names, list(range(count)))

    assert names == names_of(list(range(19)))


def test_versions_share_no_name() -> None:
    """Other weights, other names."""
    assert names_of([1, 2, 3, 4]) != names_of([1, 2, 3, 4], "v2")
