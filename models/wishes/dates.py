"""Finds years and decades in words: "80s", "the nineties", "before 1960", "between 1970 and 1980", "old", "recent"."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from models.wishes.language import english
from models.wishes.words import Token

_PARTS = {"early": (0, 3), "mid": (3, 6), "late": (6, 9)}
_AROUND_YEARS = 2
MIN_YEAR, MAX_YEAR = 1800, 2100


@dataclass(frozen=True, slots=True)
class Dates:
    """A range of years, or `old` or `recent` relative to the catalogue."""

    label: str
    first: int = MIN_YEAR
    last: int = MAX_YEAR
    relative: str = ""


def year_in_title(title: str) -> int:
    """Return the year in parentheses at the end of a title; 0 without one."""
    match = re.search(r"\((\d{4})\)\s*$", title)
    year = int(match.group(1)) if match else 0
    return year if MIN_YEAR <= year <= MAX_YEAR else 0


def find_dates(tokens: Sequence[Token], at: int) -> tuple[Dates, int] | None:
    """Return the dates that begin at a token, and the number of tokens."""
    word = tokens[at].text
    if word in ("between", "from") and (span := _span(tokens, at + 1, ("and", "to", "till", "until", "through"))):
        return span[0], span[1] + 1
    if word in english().dates["before"] or word in english().dates["after"]:
        return _open(tokens, at)
    if word in english().dates["around"] and at + 1 < len(tokens) and (year := _year(tokens[at + 1].text)):
        return Dates(f"around {year}", year - _AROUND_YEARS, year + _AROUND_YEARS), 2
    if word in ("last", "past") and at + 1 < len(tokens) and _is_of_years(tokens[at + 1 : at + 3]):
        return Dates("recent", relative="recent"), 2
    if word in _PARTS and (decade := _decade(tokens, at + 1)):
        low, high = _PARTS[word]
        first, num = decade
        return Dates(f"{word} {first}s", first + low, first + high), num + 1
    if (point := _point(tokens, at)) is None:
        return _relative(word)
    return _range(tokens, at, *point)


def _range(tokens: Sequence[Token], at: int, first: int, last: int, num: int) -> tuple[Dates, int]:
    """Return the dates of a year or decade with what follows: "1950-1960", "1990 or later"."""
    end = _point(tokens, at + num) if at + num < len(tokens) and tokens[at + num].is_joined else None
    if end is not None and end[1] > last:
        return Dates(f"{first}-{end[1]}", first, end[1]), num + end[2]
    skipped = num + (at + num < len(tokens) and tokens[at + num].text in ("or", "and", "on"))
    after = tokens[at + skipped].text if at + skipped < len(tokens) else ""
    is_compared = at + skipped + 1 < len(tokens) and tokens[at + skipped + 1].text == "than"
    if after in english().dates["onward"] and not is_compared and (skipped > num or after.startswith("onward")):
        return Dates(f"from {first}", first=first), skipped + 1
    if after in english().dates["backward"] and not is_compared and skipped > num:
        return Dates(f"until {last}", last=last), skipped + 1
    label = str(first) if first == last else f"{first}s"
    return Dates(label, first, last), num


def _is_of_years(tokens: Sequence[Token]) -> bool:
    """Whether these words are "few years", "decade" or the like."""
    return any(token.text in ("years", "decade", "decades") for token in tokens)


def _open(tokens: Sequence[Token], at: int) -> tuple[Dates, int] | None:
    word, skipped = tokens[at].text, 1
    while at + skipped < len(tokens) and tokens[at + skipped].text in ("than", "the", "year"):
        skipped += 1
    if at + skipped >= len(tokens):
        return _relative(word)
    is_before, includes = word in english().dates["before"], word in english().dates["inclusive"]
    if decade := _decade(tokens, at + skipped):
        first, last, num = decade[0], decade[0] + 9, decade[1]
    elif year := _year(tokens[at + skipped].text):
        first, last, num = year, year, 1
    else:
        return _relative(word)
    if is_before:
        return Dates(f"before {first}", last=last if includes else first - 1), skipped + num
    return Dates(f"after {first if includes else last}", first=first if includes else last + 1), skipped + num


def _relative(word: str) -> tuple[Dates, int] | None:
    relative = next((name for name in ("old", "recent") if word in english().dates[name]), None)
    return None if relative is None else (Dates(relative, relative=relative), 1)


def _span(tokens: Sequence[Token], at: int, joints: tuple[str, ...]) -> tuple[Dates, int] | None:
    begin = _point(tokens, at)
    if begin is None or at + begin[2] + 1 >= len(tokens) or tokens[at + begin[2]].text not in joints:
        return None
    end = _point(tokens, at + begin[2] + 1)
    if end is None or end[1] < begin[0]:
        return None
    return Dates(f"{begin[0]}-{end[1]}", begin[0], end[1]), begin[2] + 1 + end[2]


def _point(tokens: Sequence[Token], at: int) -> tuple[int, int, int] | None:
    """Return first and last year of the decade or year at a token, and the number of tokens."""
    if decade := _decade(tokens, at):
        return decade[0], decade[0] + 9, decade[1]
    if at < len(tokens) and (year := _year(tokens[at].text)):
        return year, year, 1
    return None


def _decade(tokens: Sequence[Token], at: int) -> tuple[int, int] | None:
    """Return the first year of a decade at a token, and the number of tokens, with "the" before it."""
    skipped = 0
    while at + skipped < len(tokens) and tokens[at + skipped].text == "the":
        skipped += 1
    if at + skipped >= len(tokens):
        return None
    word = tokens[at + skipped].text
    if word in english().dates["decades"]:
        return 1920 + 10 * english().dates["decades"].index(word), skipped + 1
    if match := re.fullmatch(r"(\d{2}|\d{4})s", word):
        number = int(match.group(1))
        if number >= 100:
            return (number // 10 * 10, skipped + 1) if MIN_YEAR <= number <= MAX_YEAR else None
        if number % 10 == 0:
            return (2000 if number < 20 else 1900) + number, skipped + 1
    return None


def _year(word: str) -> int:
    return int(word) if re.fullmatch(r"\d{4}", word) and MIN_YEAR <= int(word) <= MAX_YEAR else 0
