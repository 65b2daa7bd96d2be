"""The search of titles by words."""

import numpy as np

from services.gateway.wishes.titles import TitleIndex

INDEX = TitleIndex(["King of Comedy, The", "War of Words", "Spider-Man"])


def test_a_word_that_a_sign_excludes_finds_no_title() -> None:
    """The query omits excluded words and quotations; a hyphen within a word excludes no words."""
    for query in ("-comedy", "!comedy", '-"king of comedy"'):
        assert not INDEX.matches(query).any()

    assert np.argmax(INDEX.matches('war words -comedy -"king of"')) == 1
    assert INDEX.matches("spider-man")[2] == 1
