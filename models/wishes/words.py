"""Splits texts into words and punctuation, and reduces words to stems that related forms share."""

import re
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from models.wishes.language import english

_PLAIN = str.maketrans(
    {0x2019: "'", 0x2018: "'", 0x201C: '"', 0x201D: '"', 0x2010: "-", 0x2013: "-", 0x2212: "-"}
    | dict.fromkeys(map(ord, "\N{NO ENTRY SIGN}\N{CROSS MARK}\N{NO ENTRY}\N{THUMBS DOWN SIGN}"), " no ")
)
_FIELD = re.compile(r"(?<![^\s,;(])([-!])[a-z]+:(?=\w)")
"""The field of an excluded word: "-genre:comedy"."""
_QUOTED = re.compile(r'(?<![^\s,;(])[-!]"([^"]*)"')
MINUS = "-"
"""The word before a word that a sign excludes."""
_TOKEN = re.compile(r"w/o(?:ut)?\b|[^\W_]+(?:'[^\W_]+)*|[,.;:=!?()\"\n/&]", re.IGNORECASE)
_NOT = re.compile(r"(.*)n't$")
_SHORT = {"m": "am", "re": "are", "ve": "have", "ll": "will", "d": "would"}
"""Verbs after an apostrophe: "I'm", "we've"."""
_MIN_STEM = 4
_BEFORE_MINUS = frozenset(" \t\n,;/(")


@dataclass(frozen=True, slots=True)
class Token:
    """A word in lower case without accents, or a punctuation mark.

    Args:
        text: The word or mark.
        is_word: Whether it is a word.
        is_capital: Whether it began with a capital letter.
        is_joined: Whether a hyphen joins it to the word before.
        item: The item whose title this is, -1 for another word.
    """

    text: str
    is_word: bool = True
    is_capital: bool = False
    is_joined: bool = False
    item: int = -1


def tokens_of(text: str) -> list[Token]:
    """Split a text; contractions such as "don't" become two words."""
    plain = text.translate(_PLAIN)
    if not plain.isascii():
        decomposed = unicodedata.normalize("NFKD", plain)
        plain = "".join(letter for letter in decomposed if not unicodedata.combining(letter))
    plain = _QUOTED.sub(r' without "\1";', _FIELD.sub(r"\1", plain))
    excludes = _minus_signs(plain)
    tokens: list[Token] = []
    for match in _TOKEN.finditer(plain):
        raw = match.group()
        if not raw[0].isalnum():
            tokens.append(Token(":" if raw == "=" else raw, is_word=False))
            continue
        if excludes(match.start()):
            tokens.append(Token(MINUS))
        is_joined = match.start() > 1 and plain[match.start() - 1] == "-" and not plain[match.start() - 2].isspace()
        tokens.extend(Token(word, True, raw[0].isupper(), is_joined) for word in _expanded(raw.casefold()))
    return tokens


def _minus_signs(text: str) -> Callable[[int], bool]:
    """Return whether a word is excluded as searches write it: "scary -funny", "!funny", "+ scary - funny".

    In a text of several lines that all begin with a sign, the sign is a bullet.
    """
    if "-" not in text and "!" not in text:
        return lambda start: False
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    is_list = len(lines) > 1 and all(line[0] == "-" for line in lines)

    def excludes(start: int) -> bool:
        if "+ " in text and text[max(start - 3, 0) : start] == " - ":
            return True
        before = text[: max(start - 1, 0)]
        if text[max(start - 1, 0) : start] not in ("-", "!") or (before and before[-1] not in _BEFORE_MINUS):
            return False
        return not (is_list and (not before.strip(" ") or before.rstrip(" ").endswith("\n")))

    return excludes


def _expanded(word: str) -> list[str]:
    if contracted := _NOT.match(word):
        stump = {"ca": "can", "wo": "will"}.get(contracted.group(1), contracted.group(1))
        return [stump, "not"] if stump else ["not"]
    if (words := english().contractions.get(word)) is not None:
        return words.split()
    if word.endswith("'s"):
        word = word[:-2] + ("s" if word[:-2].isdigit() else "")
    first, *others = (part for part in word.split("'") if part)
    return [first, *(_SHORT.get(part, part) for part in others)]


def words_of(text: str) -> tuple[str, ...]:
    """Return the words of a text, without punctuation."""
    return tuple(token.text for token in tokens_of(text) if token.is_word)


def is_stop(word: str) -> bool:
    """Whether a word describes no item by itself."""
    return word in english().stop


def stem(word: str) -> str:
    """Return a form that related words share: comedy, comedies and comedic, or romance and romantic."""
    if not word.isalpha():
        return word
    if len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is")):
        word = word[: -2 if word.endswith(("xes", "ches", "shes", "sses", "zes")) else -1]
    for suffix in english().suffixes:
        if word.endswith(suffix) and len(word) - len(suffix) >= _MIN_STEM:
            return word[: -len(suffix)]
    return word


def stems(words: Iterable[str]) -> tuple[str, ...]:
    return tuple(stem(word) for word in words)


def is_one_error(word: str, other: str) -> bool:
    """Whether one letter is missing, added, changed or swapped with the next. Short stems are not compared."""
    short, long = sorted((word, other), key=len)
    if word == other or len(short) < _MIN_STEM or len(long) - len(short) > 1:
        return False
    at = next((index for index, letter in enumerate(short) if letter != long[index]), len(short))
    if len(short) < len(long):
        return short[at:] == long[at + 1 :]
    return short[at + 1 :] == long[at + 1 :] or short[at:] == long[at + 1 : at + 2] + long[at] + long[at + 2 :]
