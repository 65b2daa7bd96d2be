"""Finds whole titles of items in a wish, before it is split into clauses: titles hold commas and words such as "like".

A title of several words counts anywhere, unless it is a category's name in lower case. A title of one word counts in
quotes, or after a cue such as "like" if it is capitalised or ends its clause.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from models.wishes.language import english
from models.wishes.words import Token, is_stop, words_of

_JOINTS = frozenset({"and", "or", ",", "the", "a", "movie", "film", "show", "book", "game"})
_EXAMPLES = frozenset({"like", "unlike"})
IsValue = Callable[[Sequence[Token], int], bool]
"""Whether the name of an attribute's value begins at a token."""


class Titles:
    """The titles of a catalogue by their words. Thread-safe."""

    def __init__(self, titles: Sequence[str]) -> None:
        found: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for index, title in enumerate(titles):
            for words in forms_of_title(title):
                found[words].append(index)
        self._items_of: Mapping[tuple[str, ...], list[int]] = found
        self._first_words = frozenset(words[0] for words in found)
        self._longest = max(map(len, found), default=0)

    def marked(self, tokens: Sequence[Token], is_value: IsValue) -> list[Token]:
        """Return the tokens with each title as one token, whose `item` is the item's index."""
        marked: list[Token] = []
        at = 0
        while at < len(tokens):
            match = self._find(tokens, at) if tokens[at].text in self._first_words else None
            if match is not None and _counts(tokens, at, match[1], marked, is_value):
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
        for place in range(at, len(tokens)):
            if tokens[place].is_word:
                words.append(tokens[place].text)
                ends.append(place + 1 - at)
            elif tokens[place].text == "\n":
                break
            if len(words) == self._longest:
                break
        for num in range(len(words), 0, -1):
            if (items := self._items_of.get(tuple(words[:num]))) is not None:
                return items[0], ends[num - 1]
        return None


def _counts(tokens: Sequence[Token], at: int, length: int, before: Sequence[Token], is_value: IsValue) -> bool:
    if at > 0 and tokens[at - 1].text == '"':
        return True
    title = [token for token in tokens[at : at + length] if token.is_word]
    content = [token for token in title if not is_stop(token.text)]
    is_capital = all(token.is_capital for token in content) and title[0].is_capital
    is_example = _follows_example(before)
    if len(content) >= 2 or (len(title) >= 3 and is_example):
        return is_capital or is_example or not any(is_value(tokens, place) for place in range(at, at + length))
    ends = at + length == len(tokens) or not tokens[at + length].is_word
    return is_example and (is_capital or (ends and not is_value(tokens, at)))


def _follows_example(before: Sequence[Token]) -> bool:
    """Whether a cue for examples precedes, with nothing between but joints and other titles."""
    words = [token.text for token in before if token.text not in _JOINTS and token.item < 0]
    if before and before[-1].item >= 0:
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
