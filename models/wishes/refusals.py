"""Phrases that refuse what a clause names: before it "Dislikes:", around it "leave ... out", behind it "is boring".

Each function returns how many tokens a phrase has at a position. Pure.
"""

import itertools
from collections.abc import Sequence

from models.wishes.language import english
from models.wishes.words import Token, is_stop

_MAX_AROUND, _MAX_LABEL = 8, 4
ENDS = frozenset(".;:!?()\n")
_ANSWERED = frozenset(":?,")
_AUXILIARIES = frozenset(["is", "are", "was", "were", "do", "does", "did", "will", "would", "can", "could"])
_RELATIVE = frozenset(["that", "which", "who", "it", "there", "they", "i", "we", "you", "he", "she"])


def num_undoing(tokens: Sequence[Token], at: int) -> int:
    """Return the length of the phrase at a token that takes back what was asked for; 0 without one."""
    phrases = english().undoing.get(tokens[at].text, ())
    return next((len(phrase) for phrase in phrases if texts_of(tokens, at, len(phrase)) == phrase), 0)


def num_label(tokens: Sequence[Token], at: int) -> int:
    """Return the length of a label of dislikes and its colon at a token: "Don't want:"; 0 without one."""
    words = [token.text for token in itertools.takewhile(lambda token: token.is_word, tokens[at : at + _MAX_LABEL])]
    if texts_of(tokens, at + len(words), 1) != (":",) or not any(word in english().labels for word in words):
        return 0
    return len(words) + 1 if all(word in english().labels or is_stop(word) for word in words) else 0


def distance_around(tokens: Sequence[Token], at: int) -> int | None:
    """Return the distance to the end of "keep ... out" at a token; None without it in this clause."""
    for begin, end in english().around:
        if tokens[at].text == begin:
            for length in range(2, min(_MAX_AROUND, len(tokens) - at)):
                if not tokens[at + length].is_word:
                    break
                if tokens[at + length].text == end:
                    return length
    return None


def num_behind(tokens: Sequence[Token], begun: int, at: int) -> int:
    """Return the length of the phrase at a token that excludes what its clause names; 0 without one."""
    for phrase in english().behind.get(tokens[at].text, ()):
        if texts_of(tokens, at, len(phrase)) == phrase and (at == begun or tokens[at - 1].text != "to"):
            return len(phrase)
    if at > begun and _displeases(tokens, at):
        return len(words_until_end(tokens, at))
    if tokens[at].text in english().weakness and (
        at + 1 == len(tokens) or tokens[at + 1].text == "and" or _is_end(tokens[at + 1])
    ):
        return 1
    if at == begun:
        return 0
    if tokens[at].text in _ANSWERED or tokens[at].text == ".":
        return _answer(tokens, at)
    words = words_until_end(tokens, at)
    return len(words) if tuple(words) in english().answers or _refuses(words, tokens[at - 1].text) else 0


def _answer(tokens: Sequence[Token], at: int) -> int:
    """Return the length of a mark and the refusal after it: "horror? no way"; after a full stop of several words."""
    first = next((index for index in range(at, len(tokens)) if tokens[index].is_word), len(tokens))
    answer = words_until_end(tokens, first)
    is_answer = tuple(answer) in english().answers
    is_sentence = tokens[at].text == "." and texts_of(tokens, at + 1, 1) != (".",)
    refuses = is_answer and len(answer) > 2 if is_sentence else is_answer or _refuses(("is", *answer), "")
    return first + len(answer) - at if refuses else 0


def _displeases(tokens: Sequence[Token], at: int) -> bool:
    """Whether a verb at a token says that its subject displeases: "ruin the evening"; not in "a film to scare me"."""
    verb, displeased = (*texts_of(tokens, at, 2), "", "")[:2]
    if verb not in english().displeasing or displeased not in english().displeased:
        return False
    return tokens[at - 1].text != "to" and tokens[at - 1].text not in _RELATIVE


def _refuses(words: Sequence[str], before: str) -> bool:
    """Whether a predicate refuses its subject: "is not my thing", "are so boring"; not in "that is not boring"."""
    if not words or not (words[0] in _AUXILIARIES or words[0] in english().linking) or before in _RELATIVE:
        return False
    named = [word for word in words[1:] if word in english().appeal or not (is_stop(word) or _links(word))]
    if "too" in words[1:3] and "not" not in words and words[-1] != "too":  # "is too scary"
        return True
    if "not" in words[1:3]:
        return bool(named) and all(word in english().appeal for word in named)
    return any(word in english().faults for word in words[1:]) and all(word in english().faults for word in named)


def _links(word: str) -> bool:
    return word == "not" or word in english().linking


def words_until_end(tokens: Sequence[Token], at: int) -> list[str]:
    """Return the words from a token to the end of its clause."""
    end = next((index for index in range(at, len(tokens)) if _is_end(tokens[index])), len(tokens))
    return [token.text for token in tokens[at:end]]


def _is_end(token: Token) -> bool:
    return token.text in ENDS or token.text == "," or token.text in english().contrast


def texts_of(tokens: Sequence[Token], at: int, length: int) -> tuple[str, ...]:
    return tuple(token.text for token in tokens[at : at + length])
