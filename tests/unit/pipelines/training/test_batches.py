"""Batches hold every window once within their budget, with the next token as label."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from models.catalogue import BOS_TOKEN, Catalogue
from pipelines.data.labelled import Dislikes, Weighted
from pipelines.training.batches import IGNORED, Batch, batch_windows, cut_windows, group_by_length, make_batch
from tests.support.training.bundles import build_catalogue

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@given(LENGTHS, st.integers(1, 100), st.integers(0, 9))
def test_groups_hold_everything_once_within_the_budget(lengths: list[int], budget: int, seed: int) -> None:
    """Each window is in exactly one group, and groups of several windows stay within the budget."""
    groups = group_by_length(lengths, budget, np.random.default_rng(seed))

    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    assert all(len(g) == 1 or max(lengths[i] for i in g) * len(g) <= budget for g in groups)


@given(LENGTHS, st.integers(2, 30), st.integers(0, 9))
def test_windows_hold_every_event_of_each_epoch(lengths: list[int], max_items: int, seed: int) -> None:
    """Windows are disjoint slices within the limit that cover all but at most the first item of a sequence.

    Short sequences stay whole, and in every epoch the newest event has at least half a window before it.
    """
    sequences = [np.arange(length) + 1_000 * number for number, length in enumerate(lengths)]

    windows = cut_windows(sequences, max_items, np.random.default_rng(seed))

    items = np.concatenate(windows) if windows else np.zeros(0)
    assert len(np.unique(items)) == len(items)
    assert all(2 <= len(window) <= max_items and (np.diff(window) == 1).all() for window in windows)
    assert all(len(sequence) - len(np.intersect1d(sequence, items)) <= 1 for sequence in sequences)
    newest = {window[-1]: len(window) for window in windows}
    for sequence in sequences:
        is_long = len(sequence) > max_items
        assert len(sequence) == 1 or newest[sequence[-1]] >= (max_items // 2 + 1 if is_long else len(sequence))


def test_long_sequences_are_cut_at_other_places_in_other_epochs() -> None:
    """Different cuts train an item at several positions."""
    rng = np.random.default_rng(0)

    cuts = {tuple(len(window) for window in cut_windows([np.arange(50)], 20, rng)) for _epoch in range(100)}

    assert (20, 20, 10) in cuts
    assert len(cuts) == 10


def test_each_place_predicts_the_next_token() -> None:
    """Tokens start with the BOS token, labels are the next position's tokens, and padding is ignored."""
    batch = make_batch([np.array([2, 0]), np.array([1])], build_catalogue(3))

    assert batch.tokens.tolist() == [[BOS_TOKEN, 3], [BOS_TOKEN, BOS_TOKEN]]
    assert batch.labels.tolist() == [[3, 1], [2, IGNORED]]


def test_codes_of_depth_two_take_two_places() -> None:
    """An item is encoded level by level."""
    deep = Catalogue(("a", "b"), ("A", "B"), ((), ()), np.array([[0, 1], [1, 0]], dtype=np.int32), (2, 2), np.ones(2))

    batch = make_batch([np.array([1, 0])], deep)

    assert batch.labels.tolist() == [[2, 3, 1, 4]]
    assert batch.tokens.tolist() == [[BOS_TOKEN, 2, 3, 1]]


def test_a_dislike_is_beside_its_row_and_in_no_input() -> None:
    """A dislike after the last item adds a position without a label; missing dislikes are padded with weight 0."""
    sequence = Weighted(
        np.array([2, 0]), np.ones(2), Dislikes(np.array([1, 1]), np.array([0, 2]), np.array([1.0, 3.0]))
    )

    batch = make_batch([sequence, np.array([1])], build_catalogue(3))

    assert batch.disliked is not None
    assert batch.tokens.tolist() == [[BOS_TOKEN, 3, 1], [BOS_TOKEN] * 3]
    assert batch.labels.tolist() == [[3, 1, IGNORED], [2, IGNORED, IGNORED]]
    assert (batch.lengths, batch.weights) == ((3, 1), None)
    assert [part.tolist() for part in batch.disliked.found()] == [[0, 0], [0, 2], [1, 1], [1, 3]]
    assert batch.signed().digest != make_batch([sequence[:1], np.array([1])], build_catalogue(3)).signed().digest


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12), st.integers(1, 3)), max_size=9), st.integers(2, 12))
def test_each_place_of_a_dislike_follows_the_items_before_it(
    dislikes: list[tuple[int, int, int]], max_items: int
) -> None:
    """The tokens before a dislike's position are its history; only dislikes before the first window are lost."""
    columns = zip(*dislikes, strict=True) if dislikes else ([], [], [])
    items = np.arange(20, 32)
    sequence = Weighted(items, np.ones(12), Dislikes(*(np.array(column, dtype=np.int64) for column in columns)))
    rng, catalogue, recovered = np.random.default_rng(0), build_catalogue(40), []
    windows = cut_windows([sequence if dislikes else items], max_items, rng)

    for make in batch_windows(windows, catalogue, 30, rng):
        batch = make()
        for row, position, item, weight in (
            zip(*(part.tolist() for part in batch.disliked.found()), strict=True) if batch.disliked else ()
        ):
            history = batch.tokens[row, 1 : position + 1].tolist()
            whole = catalogue.tokens(items)[: (history[-1] - catalogue.tokens([20])[0] + 1) if history else 0]
            assert whole[len(whole) - position :] == history
            recovered.append((item, len(whole), weight))

    dropped = sum(map(len, windows)) < 12
    assert sorted(recovered) == sorted(dislike for dislike in dislikes if not (dropped and dislike[1] < 2))


def test_a_dislike_of_deeper_codes_is_a_row_of_its_own() -> None:
    """One dislike per window is drawn by weight into a separate row without labels; the window is unchanged."""
    codes = np.array([[0, 1], [1, 0], [1, 1]], dtype=np.int32)
    deep = Catalogue(("a", "b", "c"), ("A", "B", "C"), ((), (), ()), codes, (2, 2), np.ones(3))
    window = Weighted(np.array([1, 0]), np.ones(2), Dislikes(np.array([2, 2]), np.array([1, 2]), np.array([1.0, 2.0])))
    rng, drawn = np.random.default_rng(0), []

    for _ in range(300):
        batches: list[Batch] = [make() for make in batch_windows([window], deep, 1, rng)]
        (plain,), (own,) = (
            [batch for batch in batches if (batch.disliked is None) is is_plain] for is_plain in (True, False)
        )
        assert own.disliked is not None
        _, (position,), (item,), (weight,) = own.disliked.found()
        drawn.append(int(position))
        assert plain.labels.tolist() == [[2, 3, 1, 4]]
        assert plain.is_label.all()
        assert (int(item), float(weight), own.is_label.any().item()) == (2, 3.0, False)
        assert own.labels[0].tolist() == [*[2, 3, 1, 4][: 2 * position], 2, 4]

    assert 150 < drawn.count(2) < 250
