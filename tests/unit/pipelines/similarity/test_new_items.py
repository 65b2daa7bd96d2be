"""Factors of items without events: against a slow addition, and chosen only where they help and cost little."""

import numpy as np
import pytest

from models.mixer import MODEL, STUDENT, Blend, Mixer, Source, mixer_of
from models.similar import SimilarTable
from pipelines.data.examples import Cases
from pipelines.scoring.mixed import MixedScorer
from pipelines.similarity.new_items import choose_new_items

NUM_ITEMS, NUM_NEW, NUM_CASES = 200, 20, 600
IS_NEW_V = np.arange(NUM_ITEMS) >= NUM_ITEMS - NUM_NEW
"""The last items have no events; item i of the others is alike to the new item `like(i)`."""


def like(items: np.ndarray) -> np.ndarray:
    """Return the new item that each item is alike to."""
    neighbours: np.ndarray = NUM_ITEMS - NUM_NEW + items % NUM_NEW
    return neighbours


def mixer(weight: float = 0.026) -> Mixer:
    """Return one source that names each item's new neighbour."""
    table = SimilarTable(like(np.arange(NUM_ITEMS))[:, None].astype(np.int32), np.ones((NUM_ITEMS, 1), np.float16))
    return Mixer({"text": Source(table, 1, 1.0)}, {STUDENT: (Blend(0, None, {MODEL: 1.0, "text": weight}),)})


def probabilities(histories: list[np.ndarray]) -> np.ndarray:
    """Give the fifty items after the newest most of the probability, and new items almost none."""
    rows = np.full((len(histories), NUM_ITEMS), 1e-6)
    for row, history in enumerate(histories):
        following = (history[-1] + 1 + np.arange(50)) % (NUM_ITEMS - NUM_NEW)
        rows[row, following] = np.linspace(0.04, 0.001, 50)
    return rows


def cases(new_share: float) -> Cases:
    """Draw cases whose label is the next item, or in this fraction the new item like the newest."""
    draw = np.random.default_rng(0)
    newest = draw.integers(0, NUM_ITEMS - NUM_NEW, NUM_CASES)
    is_new = draw.random(NUM_CASES) < new_share
    targets = np.where(is_new, like(newest), (newest + 1) % (NUM_ITEMS - NUM_NEW))
    return Cases(("u",) * NUM_CASES, tuple(newest[:, None]), targets, np.full(NUM_CASES, np.nan))


def test_new_items_are_raised_as_far_as_others_lose_little() -> None:
    """The choice lifts new labels into the list; the others' NDCG@10 stays."""
    chosen = choose_new_items(cases(0.2), probabilities, mixer(), STUDENT, IS_NEW_V, repeats=False)

    assert chosen is not None
    assert chosen["sources"] > 1
    assert chosen["num_items"] == NUM_NEW


def test_nothing_is_raised_without_a_gain() -> None:
    """Too few new labels, new labels that the mix already shows, and a model without a mix change nothing."""
    unmixed = Mixer({}, {STUDENT: ()})

    assert choose_new_items(cases(0.01), probabilities, mixer(), STUDENT, IS_NEW_V, repeats=False) is None
    assert choose_new_items(cases(0.2), probabilities, mixer(1.0), STUDENT, IS_NEW_V, repeats=False) is None
    assert choose_new_items(cases(0.2), probabilities, unmixed, STUDENT, IS_NEW_V, repeats=False) is None


@pytest.mark.parametrize(("num_validated", "share"), [(NUM_NEW, 1.0), (NUM_NEW // 2, 0.5)])
def test_served_scores_equal_a_slow_addition_and_shrink_for_more_new_items(num_validated: int, share: float) -> None:
    """A manifest's factors multiply both parts of a new item's score, less where more items are new than validated."""
    raised = {STUDENT: {"model": 21.0, "sources": 1.5, "num_items": num_validated}}
    blend = {"history": [0, None], "weights": {MODEL: 1.0, "text": 0.02}}
    about = {"sources": {"text": {"newest": 1, "decay": 1.0}}, "blends": {STUDENT: [blend]}, "new_items": raised}
    served = mixer_of({"mixer": about}, {"text": mixer().sources["text"].table}, np.where(IS_NEW_V, 0.0, 3.0))
    assert served is not None
    history, logits = np.array([7]), np.random.default_rng(1).normal(size=NUM_ITEMS).astype(np.float32)
    own = np.exp(logits) / np.exp(logits).sum()
    slow = own * np.where(IS_NEW_V, 1 + share * 20, 1)
    slow[like(history)[0]] += 0.02 * (1 + share * 0.5)
    added = served.added(STUDENT, history)
    assert added is not None

    everything = np.ones(NUM_ITEMS, bool)
    dense, ranked = (
        added.best(logits, everything, 30),
        added.best_ranked(np.arange(NUM_ITEMS), np.log(own), everything, 30),
    )
    scored = MixedScorer(served, STUDENT, lambda _: own[None].copy())([history])[0]

    for items, scores in (dense, ranked):
        assert items.tolist() == np.argsort(-slow, kind="stable")[:30].tolist()
        assert scores == pytest.approx(np.log(slow[items]), rel=1e-4)
    assert scored == pytest.approx(slow, rel=1e-4)
