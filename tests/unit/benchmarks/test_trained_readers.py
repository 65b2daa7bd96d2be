"""The comparison of trained readers of wishes, and the targets and answers of the LLMs among them."""

import numpy as np
import pytest

from benchmarks.wishes.llm import answer_of, wants_of
from benchmarks.wishes.trained import _summary
from models.wishes.clauses import Polarity
from models.wishes.vocabulary import Vocabulary, WishItem
from pipelines.wishes.generate import Wish


def test_a_reader_of_some_wishes_is_compared_on_these_wishes_only() -> None:
    """The part that it closes and its difference come from the wishes that it read."""
    rows = [
        {"unread": 0.0, "shipped": 0.5, "oracle": 1.0, "cross": 0.75},
        {"unread": 0.2, "shipped": 0.2, "oracle": 0.2},
    ]
    summary = _summary("cross", rows)
    assert (summary["num_wishes"], summary["ndcg10"], summary["closed"]) == (1, 0.75, 0.75)
    assert summary["change"] == pytest.approx([0.25, 0.25, 0.25])
    assert _summary("shipped", rows)["num_wishes"] == 2


def test_the_slots_of_a_wish_are_the_right_answer() -> None:
    """The LLM learns to write three lists: the values that a phrasing wants, refuses and takes as examples."""
    given = {"a": "comedy", "date": "1990s", "x": "horror", "title": "Paper Moons"}
    wish = Wish("turn", 0, "", (), np.zeros(1, dtype=bool), np.zeros(1, dtype=bool), given)
    assert answer_of(wish) == '{"must": ["comedy", "1990s"], "must_not": ["horror"], "liked": ["Paper Moons"]}'


def test_the_words_of_an_answer_count_as_words_of_clauses() -> None:
    """An answer's words become values, dates and examples of the catalogue with the polarity of their list."""
    titles = [("Paper Moons (1996)", "Comedy"), ("Blue Canyon (1958)", "Horror")]
    items = [WishItem(str(number), title, (value,)) for number, (title, value) in enumerate(titles)]
    wants = wants_of(Vocabulary(items), {"must": ["comedies", "90s"], "must_not": ["scary"], "liked": ["Paper Moons"]})
    assert {term.value: polarity for term, (polarity, _) in wants.values.items()} == {
        "Comedy": Polarity.WANT,
        "Horror": Polarity.AVOID,
    }
    assert [dates.label for _, dates, _ in wants.dates] == ["1990s"]
    assert wants.examples == {0: (Polarity.LIKE, 1.0)}
