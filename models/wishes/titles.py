"""Finds whole titles of items in a wish, before it is split into clauses: titles hold commas and words such as "like".

A title of several words counts anywhere, unless it is a category's name in lower case. A title of one word counts in
quotes, after a cue such as "like" if it is capitalised or ends its clause, capitalised among words that are not, and as
the whole wish.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from models.wishes.language import english
from models.wishes.words import Token, is_stop, words_of

_JOINTS = frozenset({"and", "or", ",", "the", "a", "movie", "film", "show", "book", "game"})
_EXAMPLES = frozenset({"like", "unlike"})
Certainty = Callable[[Sequence[Token], int], float]
"""How certainly a word of the catalogue's values begins at a token, from 0 to 1, which is a value's own name."""


class Titles:
    """The titles of a catalogue by their words. Thread-safe."""

    def __init__(self, items_of: Mapping[tuple[str, ...], np.ndarray]) -> None:
        """Take the items of each form of a title, in order of index; see `forms_of_title`."""
        self._items_of = items_of
        self._first_words = frozenset(words[0] for words in items_of)
        self._longest = max(map(len, items_of), default=0)

    def marked(self, tokens: Sequence[Token], certainty: Certainty) -> list[Token]:
        """Return the tokens with each title as one token, whose `item` is the item's index."""
        marked: list[Token] = []
        at = 0
        while at < len(tokens):
            match = self._find(tokens, at) if tokens[at].text in self._first_words else None
            if match is not None and _counts(tokens, at, match[1], marked, certainty):
                marked.append(replace(tokens[at], text="", item=match[0]))
                at += match[1]
            else:
                marked.append(tokens[at])
                at += 1
        return marked

    def _find(self, tokens: Sequence[Token], at: int) -> tuple[int, int] | None:
        """Return the first item with the longest title at a token, and the number of tokens."""
        words: list[str] = []
        ends: list[int] = []
        for index in range(at, len(tokens)):
            if tokens[index].is_word:
                words.append(tokens[index].text)
                ends.append(index + 1 - at)
            elif tokens[index].text == "\n":
                break
            if len(words) == self._longest:
                break
        for num in range(len(words), 0, -1):
            if (items := self._items_of.get(tuple(words[:num]))) is not None:
                return int(items[0]), ends[num - 1]
        return None


def _counts(tokens: Sequence[Token], at: int, length: int, before: Sequence[Token], certainty: Certainty) -> bool:
    if at > 0 and tokens[at - 1].text == '"':
        return True
    title = [token for token in tokens[at : at + length] if token.is_word]
    content = [token for token in title if not is_stop(token.text)]
    is_capital = all(token.is_capital for token in content) and title[0].is_capital
    is_example = _follows_example(before)
    if len(content) >= 2 or (len(title) >= 3 and is_example):
        return is_capital or is_example or not any(certainty(tokens, index) == 1 for index in range(at, at + length))
    if length == sum(token.is_word for token in tokens):
        return bool(content) and not certainty(tokens, at)
    ends = at + length == len(tokens) or not tokens[at + length].is_word
    if is_example:
        return is_capital or (ends and certainty(tokens, at) < 1)
    named = max(certainty(tokens, index) for index in range(at, at + length))
    return _stands_out(tokens, at, length, content, ends=ends) and named < (1.0 if length > 1 else 0.1)


def _stands_out(tokens: Sequence[Token], at: int, length: int, content: Sequence[Token], *, ends: bool) -> bool:
    """Whether a title of one word is capitalised where other words are not."""
    if not content or not content[-1].is_capital or content[-1].text in english().capitals:
        return False
    others = [token for token in (*tokens[:at], *tokens[at + length :]) if token.is_word]
    if sum(token.is_capital for token in others) > len(others) / 2:
        return False
    begins = at == 0 or tokens[at - 1].text in ".!?\n"
    return not begins or length > 1 or ends or tokens[at + length].text in ("is", "was", "were")


def _follows_example(before: Sequence[Token]) -> bool:
    """Whether a cue for examples precedes, with nothing between but joints and other titles."""
    words = [token.text for token in before if token.text not in _JOINTS and token.item < 0]
    last = next((token for token in reversed(before) if token.text not in _JOINTS), None)
    if last is not None and last.item >= 0:
        return True
    cues = english().cues
    return any(cues.get(tuple(words[-length:])) in _EXAMPLES for length in range(1, english().longest_cue + 1))


def forms_of_title(title: str) -> set[tuple[str, ...]]:
    """Return the words of a title without its year and remarks in parentheses, its article first, last or absent."""
    plain = title.split("(", maxsplit=1)[0].strip() or title
    words, articles = words_of(plain), english().articles
    if len(words) > 1 and words[-1] in articles and "," in plain:
        words = (words[-1], *words[:-1])
    forms = {words}
    if len(words) > 2 and words[0] in articles:
        forms.add(words[1:])
    return {form for form in forms if form}


def natural_title(title: str) -> str:
    """Return a title as people write it: without the year, its article first."""
    plain = title.split("(", maxsplit=1)[0].strip() or title
    head, _, article = plain.rpartition(", ")
    return f"{article} {head}" if head and article.casefold() in english().articles else plain
