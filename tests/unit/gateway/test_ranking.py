"""Rankings merge into one list: allowed items without duplicates, best tier first, by descending score."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.contracts.recommend import Tier
from services.gateway.ranking import ItemRanking, best_allowed, choose, merge
from services.gateway.request.masks import merge_history


@pytest.mark.parametrize(
    ("stored", "recent", "merged"),
    [
        ("abc", "", "abc"),
        ("", "ab", "ab"),
        ("abc", "d", "abcd"),
        ("abc", "c", "abc"),
        ("abc", "bc", "abc"),
        ("abc", "bcd", "abcd"),
        ("abc", "abc", "abc"),
        ("abc", "ab", "abcab"),
        ("aba", "aba", "aba"),
        ("aab", "abx", "aabx"),
    ],
)
def test_recent_items_that_the_store_has_seen_are_not_repeated(stored: str, recent: str, merged: str) -> None:
    """The longest overlap of the stored history's end with the recent items' beginning counts once."""
    assert merge_history(tuple(stored), tuple(recent)) == tuple(merged)


RANKINGS = st.lists(
    st.dictionaries(st.integers(0, 9), st.floats(-5, 5)).map(
        lambda scores: ItemRanking.in_order(Tier.STUDENT, dict(zip(scores, sorted(scores.values())[::-1], strict=True)))
    ),
    max_size=3,
)


@example(
    [ItemRanking.in_order(Tier.LLM, {0: -1e-45}), ItemRanking.in_order(Tier.POPULAR, {1: 5.0})],
    [True] * 10,
    [True] * 12,
    2,
)
@given(
    RANKINGS,
    st.lists(st.booleans(), min_size=10, max_size=10),
    st.lists(st.booleans(), min_size=12),
    st.integers(1, 12),
)
def test_the_list_is_the_first_k_allowed_over_all_rankings(
    rankings: list[ItemRanking], allowed: list[bool], available: list[bool], k: int
) -> None:
    """The result equals joining, filtering and cutting the rankings without hidden items; scores never rise."""
    shown = [index for index in range(10) if allowed[index] and available[index]]
    joined = [index for ranking in rankings for index in ranking.indices.tolist() if index in shown]

    chosen = choose(rankings, np.array(allowed), k, np.array(available))

    assert [index for index, _, _ in chosen] == list(dict.fromkeys(joined))[:k]
    scores = [score for _, score, _ in chosen]
    assert scores == sorted(scores, reverse=True)


def test_later_rankings_are_not_computed_when_the_list_is_full() -> None:
    """A ranking that is not needed is never drawn from the iterator, also not for `num_enough`."""

    def rankings():  # type: ignore[no-untyped-def]  # a generator that must not be drawn twice
        yield ItemRanking.in_order(Tier.LLM, {1: 0.5, 2: 0.4})
        raise AssertionError

    assert len(choose(rankings(), np.ones(5, dtype=bool), 2, np.ones(9, dtype=bool))) == 2
    (part,) = merge(rankings(), np.ones(5, dtype=bool), 5, np.ones(9, dtype=bool), num_enough=2)
    assert part.indices.tolist() == [1, 2]


@given(st.permutations(range(40)), st.sets(st.integers(0, 39)), st.integers(1, 6))
def test_a_full_ranking_is_cut_to_the_first_allowed(order: list[int], allowed_items: set[int], k: int) -> None:
    """The first k allowed items are kept in order with their scores, also items at the far end."""
    scores, allowed = np.linspace(1, 0, 40), np.isin(np.arange(40), list(allowed_items))

    indices, kept = best_allowed(np.array(order), scores, allowed, k)

    expected = [(index, scores[position]) for position, index in enumerate(order) if allowed[index]][:k]
    assert list(zip(indices, kept, strict=True)) == expected
