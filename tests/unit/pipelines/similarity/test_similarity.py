"""Co-visits against a slow definition, nearest items against all cosines, and the mix chosen by held-out items."""

from collections import Counter
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.errors import BundleCorrupt
from models.similar import NONE, SimilarTable, load_similar
from pipelines.codes.embedding import unit
from pipelines.data.examples import Cases
from pipelines.similarity import co_visits, vectors
from pipelines.similarity.co_visits import Neighbours, count_co_visits, count_transitions
from pipelines.similarity.mix import Mix, Sources, choose, table_of, with_texts
from pipelines.similarity.vectors import nearest

NUM_ITEMS = 12
SEQUENCES = st.lists(st.lists(st.integers(0, NUM_ITEMS - 1), min_size=1, max_size=30), min_size=1, max_size=8)


def slow_co_visits(sequences: list[list[int]], weights: list[list[float]]) -> dict[int, Counter[int]]:
    """Count pairs of a user's events at most ten positions apart."""
    counts: dict[int, Counter[int]] = {item: Counter() for item in range(NUM_ITEMS)}
    for items, own in zip(sequences, weights, strict=True):
        for first in range(len(items)):
            for second in range(first + 1, min(len(items), first + 11)):
                if items[first] != items[second]:
                    value = min(own[first], own[second]) / (second - first)
                    counts[items[first]][items[second]] += value
                    counts[items[second]][items[first]] += value / 2
    return counts


@given(SEQUENCES, st.integers(0, 3), st.booleans())
@settings(max_examples=40)
def test_co_visits_equal_their_definition(sequences: list[list[int]], seed: int, is_bounded: bool) -> None:
    """The counts equal the definition for any weights and any limit on pairs in memory."""
    rng = np.random.default_rng(seed)
    weights = [rng.choice([0.5, 1.0, 2.0], len(items)).tolist() for items in sequences]
    before = co_visits._PAIRS_AT_ONCE
    co_visits._PAIRS_AT_ONCE = 16 if is_bounded else before
    try:
        table = count_co_visits(
            [np.array(items) for items in sequences], NUM_ITEMS, NUM_ITEMS, [np.array(own) for own in weights]
        )
    finally:
        co_visits._PAIRS_AT_ONCE = before

    expected = slow_co_visits(sequences, weights)
    for item in range(NUM_ITEMS):
        got = {
            int(other): float(count)
            for other, count in zip(table.items_VC[item], table.figures_VC[item], strict=True)
            if other != NONE
        }
        assert got == pytest.approx(dict(expected[item]), rel=1e-5)


@given(SEQUENCES)
@settings(max_examples=40)
def test_transitions_equal_their_definition(sequences: list[list[int]]) -> None:
    """A follower's fraction is its count within five events, 1/d at distance d, over all of the item's followers."""
    counts: dict[int, Counter[int]] = {item: Counter() for item in range(NUM_ITEMS)}
    for items in sequences:
        for first, second in combinations(range(len(items)), 2):
            if second - first <= 5:
                counts[items[first]][items[second]] += 1 / (second - first)

    table = count_transitions([np.array(items) for items in sequences], NUM_ITEMS, NUM_ITEMS)

    for item, own in counts.items():
        row = zip(table.items_VC[item].tolist(), table.figures_VC[item].tolist(), strict=True)
        assert {other: share for other, share in row if other != NONE} == pytest.approx(
            {other: count / own.total() for other, count in own.items()}, rel=1e-5
        )
        assert (np.diff(table.figures_VC[item]) <= 1e-6).all()


def test_the_nearest_by_clusters_are_most_of_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """For clustered items, the search finds at least 90 % of the exact neighbours and never the item itself."""
    rng = np.random.default_rng(0)
    rows = np.repeat(rng.standard_normal((40, 16)), 50, axis=0) + 0.4 * rng.standard_normal((2_000, 16))
    exact = nearest(rows, 10)
    monkeypatch.setattr(vectors, "_MOST_COMPARED_WHOLE", 100)
    monkeypatch.setattr(vectors, "_CLUSTERS_SEARCHED", 6)

    by_clusters = nearest(rows, 10)

    cosines = unit(rows) @ unit(rows).T
    np.fill_diagonal(cosines, -1)
    assert (exact.items_VC[:, 0] == cosines.argmax(axis=1)).all()
    shares = [np.isin(ours, theirs).mean() for ours, theirs in zip(exact.items_VC, by_clusters.items_VC, strict=True)]
    assert np.mean(shares) >= 0.9
    assert not (by_clusters.items_VC == np.arange(2_000)[:, None]).any()


def sources_of(visits: np.ndarray, near: np.ndarray) -> Sources:
    """Build sources that give each item a well-supported candidate of each kind."""
    figures = np.full((len(visits), 1), 50.0)
    return Sources(
        Neighbours(visits[:, None].astype(np.int32), figures),
        Neighbours(near[:, None].astype(np.int32), np.full((len(near), 1), 0.5)),
        np.ones(len(visits)),
    )


@pytest.mark.parametrize("next_is", ["visits", "near"])
def test_what_predicts_held_out_items_is_chosen(next_is: str) -> None:
    """The source that predicts the held-out items gets most of the weight."""
    items = np.arange(NUM_ITEMS)
    kinds = {"visits": (items + 1) % NUM_ITEMS, "near": (items + 5) % NUM_ITEMS}
    cases = Cases(
        user_ids=tuple(map(str, items)),
        histories=tuple(np.array([item]) for item in items),
        targets=kinds[next_is],
        idle_s=np.zeros(NUM_ITEMS),
    )

    choice = choose(sources_of(kinds["visits"], kinds["near"]), cases, repeats=False)
    table = table_of(sources_of(kinds["visits"], kinds["near"]), Mix(**choice["mix"]))

    best, _ = table.best([0], np.ones(NUM_ITEMS, dtype=bool), 1)
    assert best == [kinds[next_is][0]]
    assert (choice["mix"]["share"] >= 0.5) == (next_is == "near")
    assert choice["ndcg10"] == 1.0 > choice["popularity_ndcg10"]


def test_items_that_nobody_used_are_near_by_their_texts() -> None:
    """An item without events gets neighbours by text; other items keep theirs."""
    texts = ["red shoe for running", "blue kettle of steel", "running shoe red and light", "steel kettle"]
    before = Neighbours(np.array([[1], [0], [1], [0]], dtype=np.int32), np.full((4, 1), 0.5, dtype=np.float32))

    table = with_texts(before, np.array([3.0, 3.0, 0.0, 3.0]), texts)

    assert table.items_VC[:, 0].tolist() == [1, 0, 0, 0]


def test_a_cart_sums_its_items_neighbours() -> None:
    """An item near both cart items ranks before the nearest item of one; ties are ordered by index."""
    table = SimilarTable(
        np.array([[2, 3, NONE], [4, 3, NONE], *[[NONE] * 3] * 4], dtype=np.int32),
        np.array([[0.6, 0.5, 0], [0.6, 0.5, 0], *[[0] * 3] * 4], dtype=np.float16),
    )

    items, scores = table.best([0, 1], np.ones(6, dtype=bool), 5)

    assert items.tolist() == [3, 2, 4]
    assert scores == pytest.approx([0.5, 0.3, 0.3], abs=1e-3)


def test_a_table_of_another_catalogue_is_refused(tmp_path: Path) -> None:
    """A truncated table, or a table of another size, is rejected; without a table the neighbours are empty."""
    SimilarTable(np.array([[1], [2]], dtype=np.int32), np.ones((2, 1), dtype=np.float16)).save(tmp_path / "similar")

    for num_items in (2, 3):
        with pytest.raises(BundleCorrupt, match="similar"):
            load_similar(tmp_path / "similar", num_items)
    (tmp_path / "similar" / "scores.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(BundleCorrupt, match=r"scores\.npy"):
        load_similar(tmp_path / "similar", 3)
    assert load_similar(tmp_path / "none", 3).best([0], np.ones(3, dtype=bool), 5)[0].tolist() == []
