"""The word index against scikit-learn's."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from sklearn.feature_extraction.text import TfidfVectorizer

from services.items.words import WordIndex, text_of

WORDS = ("red", "Blue", "shirt", "shoe", "été", "x1", "a")
texts = st.lists(st.lists(st.sampled_from(WORDS), max_size=6).map(" ".join), min_size=1, max_size=8)


@given(texts, st.lists(st.sampled_from((*WORDS, "unknown")), max_size=6).map(" ".join))
def test_cosines_are_those_of_an_independent_implementation(known: list[str], text: str) -> None:
    """Items with a common word rank by cosine, ties by index; words of no item count in the text's norm."""
    expected = TfidfVectorizer(binary=True, vocabulary=["red", "blue", "shirt", "shoe", "été", "x1", "unknown"])
    rows = expected.fit_transform(known)
    cosines = (rows @ expected.transform([text]).T).toarray().ravel()
    index = WordIndex(known)
    indices, near = index.nearest(text, 3)

    order = [position for position in np.lexsort((np.arange(len(known)), -cosines.round(6))) if cosines[position] > 0][
        :3
    ]
    assert sorted(near, reverse=True) == list(near)
    np.testing.assert_allclose(near, cosines[indices], atol=1e-6)
    np.testing.assert_allclose(near, cosines[order], atol=1e-6)


def test_a_title_that_is_the_id_describes_nothing() -> None:
    """Only categories describe an item whose title is its id."""
    assert text_of("i1", "i1", ("Red", "Shirts")) == " Red Shirts"
    assert text_of("Red shirt", "i1", ()) == "Red shirt"
