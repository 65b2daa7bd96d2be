"""Rules of the wishes that are written from a catalogue's own words."""

import numpy as np
import pytest

from models.wishes.vocabulary import Vocabulary, WishItem
from pipelines.data.examples import Cases
from pipelines.wishes.generate import Wish, Words, training_phrasings, write_wishes

CATEGORIES = (("Comedy",), ("Comedy", "Romance"), ("Drama",), ("Drama", "Romance"))
ITEMS = [WishItem(str(n), f"Title Number {n} ({1980 + n % 20})", CATEGORIES[n % 4]) for n in range(60)]
NEAR = np.stack([(np.arange(60) + step) % 60 for step in range(1, 9)], axis=1)
MOODS = {"Comedy": ["gags"], "Romance": ["kisses"], "Drama": ["tears"]}


@pytest.fixture
def wishes() -> list[Wish]:
    """Wishes of all kinds for some labels."""
    targets = np.arange(0, 60, 3)
    histories = tuple(np.array([0]) for _ in targets)
    cases = Cases(tuple(map(str, targets)), histories, targets, np.zeros(len(targets)))
    return write_wishes(cases, Words(Vocabulary(ITEMS), NEAR, MOODS), training_phrasings())


def test_a_wish_means_its_label_and_nothing_that_it_excludes(wishes: list[Wish]) -> None:
    """The label is among the meant items, and excluded items are not."""
    for wish in wishes:
        assert wish.meant_V[3 * wish.case]
        assert not (wish.meant_V & wish.excluded_V).any()


def test_every_kind_of_phrasing_is_written(wishes: list[Wish]) -> None:
    """Each kind of the phrasings occurs, and no slot stays open."""
    assert {wish.kind for wish in wishes} == set(training_phrasings())
    assert not [wish.text for wish in wishes if "{" in wish.text or "\n" in wish.text]


def test_a_conversation_has_an_earlier_wish(wishes: list[Wish]) -> None:
    """Only conversations have earlier wishes."""
    assert all(bool(wish.session) == (wish.kind == "turn") for wish in wishes)


def test_the_same_seed_writes_the_same_wishes(wishes: list[Wish]) -> None:
    """Stages are addressed by content, so writing is deterministic."""
    cases = Cases(("a",), (np.array([0]),), np.array([0]), np.zeros(1))
    words = Words(Vocabulary(ITEMS), NEAR, MOODS)
    first, second = (write_wishes(cases, words, training_phrasings(), seed=3) for _ in range(2))
    assert [wish.text for wish in first] == [wish.text for wish in second]
