"""Splits a wish into clauses: what is wanted, what is not, and examples, by words such as "no", "without" or "but".

A clause ends at punctuation or at a word of contrast. A list goes on: "no romance, drama or horror" is one clause.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from models.wishes.language import english
from models.wishes.words import Token, is_stop


class Polarity(StrEnum):
    """How a clause regards what it names."""

    WANT = "want"
    AVOID = "avoid"
    """Stated without doubt."""
    LESS = "less"
    """"not too", "less", "rather not": lowers scores and excludes nothing."""
    LIKE = "like"
    UNLIKE = "unlike"


@dataclass(frozen=True, slots=True)
class ClauseOfWish:
    """A run of tokens with one polarity."""

    polarity: Polarity
    tokens: tuple[Token, ...]
    is_replacement: bool = False
    """Whether the wish takes back what earlier wishes asked for: "actually", "instead"."""


_MAX_AROUND = 8
_ENDS = frozenset(".;:!?()\n")


def clauses_of(tokens: Sequence[Token]) -> list[ClauseOfWish]:
    """Return the clauses of a wish in order; clauses without words are dropped."""
    found: list[ClauseOfWish] = []
    polarity, begun, at = Polarity.WANT, 0, 0
    replaces = _replaces(tokens)
    while at < len(tokens):
        token = tokens[at]
        if token.text in english().prefixes and at + 1 < len(tokens) and tokens[at + 1].is_joined:  # "non-violent"
            _end(found, polarity, tokens[begun:at], is_replacement=replaces)
            _end(found, Polarity.AVOID, tokens[at + 1 : at + 2], is_replacement=replaces)
            at = begun = at + 2
        elif (distance := _around(tokens, at)) is not None:
            _end(found, polarity, tokens[begun:at], is_replacement=replaces)
            _end(found, Polarity.AVOID, tokens[at + 1 : at + distance], is_replacement=replaces)
            at = begun = at + distance + 1
        elif polarity in (Polarity.WANT, Polarity.LIKE) and (length := _behind(tokens, at)) > 0:
            _end(found, Polarity.AVOID, tokens[begun:at], is_replacement=replaces)
            at = begun = at + length
        elif (cue := _cue_at(tokens, at)) is not None:
            _end(found, polarity, tokens[begun:at], is_replacement=replaces)
            at = begun = at + cue[1]
            polarity = _polarity(cue[0], polarity, tokens[at].text if at < len(tokens) else "")
        elif token.text == "free" and token.is_joined and at > begun:  # "gore-free"
            _end(found, polarity, tokens[begun : at - 1], is_replacement=replaces)
            _end(found, Polarity.AVOID, tokens[at - 1 : at], is_replacement=replaces)
            at = begun = at + 1
        elif _ends_clause(tokens, at, polarity):
            _end(found, polarity, tokens[begun:at], is_replacement=replaces)
            polarity, at = Polarity.WANT, at + 1
            begun = at
        else:
            at += 1
    _end(found, polarity, tokens[begun:], is_replacement=replaces)
    return found


def _polarity(cue: str, before: Polarity, following: str) -> Polarity:
    """Return the polarity after a cue, given the polarity before it and the next word."""
    if cue == "skip":
        return before
    polarity = Polarity(cue)
    if polarity == Polarity.AVOID and following in english().softeners:
        return Polarity.LESS
    if polarity == Polarity.LIKE and before in (Polarity.AVOID, Polarity.LESS, Polarity.UNLIKE):
        return Polarity.UNLIKE
    return polarity


def _cue_at(tokens: Sequence[Token], at: int) -> tuple[str, int] | None:
    """Return the longest cue at a token, and its length."""
    cues = english().cues
    for length in range(min(english().longest_cue, len(tokens) - at), 0, -1):
        if (cue := cues.get(tuple(token.text for token in tokens[at : at + length]))) is not None:
            return cue, length
    return None


def _around(tokens: Sequence[Token], at: int) -> int | None:
    """Return the distance to the end of "keep ... out" at a token; None without it in this clause."""
    for begin, end in english().around:
        if tokens[at].text == begin:
            for length in range(2, min(_MAX_AROUND, len(tokens) - at)):
                if not tokens[at + length].is_word:
                    break
                if tokens[at + length].text == end:
                    return length
    return None


def _behind(tokens: Sequence[Token], at: int) -> int:
    """Return the length of a phrase at a token that excludes what its clause names; 0 without one."""
    for phrase in english().behind:
        if tuple(token.text for token in tokens[at : at + len(phrase)]) == phrase:
            return len(phrase)
    return 0


def _ends_clause(tokens: Sequence[Token], at: int, polarity: Polarity) -> bool:
    token = tokens[at]
    if token.text in _ENDS or token.text in english().contrast:
        return True
    following = tokens[at + 1].text if at + 1 < len(tokens) else ""
    if token.text == ",":
        return polarity not in (Polarity.AVOID, Polarity.LESS) or not _list_goes_on(tokens, at + 1)
    return token.text == "and" and polarity not in (Polarity.WANT, Polarity.LIKE) and following in english().restarts


def _list_goes_on(tokens: Sequence[Token], at: int) -> bool:
    """Whether the words after a comma continue a list that ends with "or" or "nor"."""
    first: list[str] = []
    for token in tokens[at:]:
        if token.text in _ENDS or token.text in english().contrast:
            break
        first.append(token.text)
    if not first or first[0] in english().restarts:
        return False
    if first[0] in ("or", "nor"):
        return True
    joints = [place for place, word in enumerate(first) if word in ("or", "nor")]
    return bool(joints) and sum(not is_stop(word) and word != "," for word in first[: joints[0]]) <= 3


def _replaces(tokens: Sequence[Token]) -> bool:
    words = [token.text for token in tokens]
    for phrase in english().replacing:
        for at in range(len(words) - len(phrase) + 1):
            if tuple(words[at : at + len(phrase)]) == phrase and words[at + len(phrase) : at + len(phrase) + 1] != [
                "of"
            ]:
                return True
    return False


def _end(found: list[ClauseOfWish], polarity: Polarity, tokens: Sequence[Token], *, is_replacement: bool) -> None:
    if any(token.is_word and token.text not in english().pronouns for token in tokens):
        found.append(ClauseOfWish(polarity, tuple(tokens), is_replacement))
