"""Reads a language's words of requests from a file of this folder."""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

Phrase = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Language:
    """Words and phrases of requests; `english.toml` explains them.

    `cues` maps phrases to a polarity's name, or to `skip`; `dates` maps `old`, `before` and so on to words.
    """

    stop: frozenset[str]
    suffixes: tuple[str, ...]
    articles: frozenset[str]
    nameless: frozenset[str]
    softeners: frozenset[str]
    prefixes: frozenset[str]
    contrast: frozenset[str]
    restarts: frozenset[str]
    conjunctions: frozenset[str]
    disjunctions: frozenset[str]
    pronouns: frozenset[str]
    replacing: tuple[Phrase, ...]
    around: tuple[Phrase, ...]
    behind: Mapping[str, tuple[Phrase, ...]]
    labels: frozenset[str]
    undoing: Mapping[str, tuple[Phrase, ...]]
    """Phrases by their first word, as `behind`."""
    displeasing: frozenset[str]
    displeased: frozenset[str]
    linking: frozenset[str]
    weakness: frozenset[str]
    faults: frozenset[str]
    appeal: frozenset[str]
    answers: frozenset[Phrase]
    comparing: frozenset[str]
    capitals: frozenset[str]
    fillers: tuple[str, ...]
    synonyms: tuple[tuple[tuple[Phrase, ...], tuple[Phrase, ...]], ...]
    """Groups of phrases with the same meaning: almost always, and mostly."""
    contractions: Mapping[str, str]
    cues: Mapping[Phrase, str]
    longest_cue: int
    dates: Mapping[str, tuple[str, ...]]


@cache
def english() -> Language:
    """Return the English language."""
    about = tomllib.loads(files("models.wishes").joinpath("english.toml").read_text(encoding="utf-8"))
    groups = [(_phrases(group["same"].split(",")), _phrases(group["near"].split(","))) for group in about["synonyms"]]
    cues = {tuple(phrase.split()): kind for kind, phrases in about["cues"].items() for phrase in phrases}
    sets = {name: frozenset(words.split()) for name, words in about.items() if isinstance(words, str)}
    del sets["suffixes"], sets["fillers"]
    return Language(
        **sets,
        suffixes=tuple(about["suffixes"].split()),
        replacing=_phrases(about["replacing"]),
        around=tuple(map(tuple, about["around"])),
        behind=_by_first_word(about["behind"]),
        undoing=_by_first_word(about["undoing"]),
        answers=frozenset(_phrases(about["answers"])),
        synonyms=tuple(groups),
        fillers=tuple(about["fillers"].strip().replace("\n", "|").split("|")),
        contractions=about["contractions"],
        cues=cues,
        longest_cue=max(map(len, cues)),
        dates={name: tuple(words.split()) for name, words in about["dates"].items()},
    )


def _phrases(phrases: Iterable[str]) -> tuple[Phrase, ...]:
    return tuple(tuple(phrase.split()) for phrase in phrases)


def _by_first_word(phrases: Iterable[str]) -> Mapping[str, tuple[Phrase, ...]]:
    by_word: dict[str, tuple[Phrase, ...]] = {}
    for phrase in _phrases(phrases):
        by_word[phrase[0]] = (*by_word.get(phrase[0], ()), phrase)
    return by_word
