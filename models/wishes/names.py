"""The names of a catalogue's values in wishes.

A value is matched by its name, by a word that only its name has, by abbreviation ("sci-fi" and "science fiction"), by
synonyms in English, and despite one typing error. If two values share a name, the first has it.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from models.wishes.language import english
from models.wishes.words import is_one_error, is_stop, stem, stems, words_of

_SHORT, _NUM_KEPT = 4, 4_096
_SAME, _NEAR = 0.9, 0.6
"""Certainty of synonyms: only the first exclude items."""
_MIN_MISTYPED, _MAX_MISTYPED = 5, 5_000
"""Minimum letters of a name for correction, and maximum values of a catalogue for correction."""


@dataclass(frozen=True, slots=True)
class Term:
    """A value that a wish names: an attribute's text, whose items are known."""

    attribute: str
    value: str


class TermNames:
    """The names of some terms. Immutable."""

    def __init__(self, terms: Sequence[Term]) -> None:
        self.terms = terms
        names = {term: words_of(term.value) for term in terms}
        self.phrases = _phrases_of(names)
        """Terms and certainties by the stems of their names, of single words, abbreviations and synonyms."""
        short = ((words, term) for term, words in names.items() if len(words) == 2)
        self._abbreviated = [(words, term) for words, term in short if max(map(len, words)) < _SHORT]
        self._single_words = self._index_single_words([*names.values()])

    def _index_single_words(self, names: Sequence[tuple[str, ...]]) -> dict[tuple[str, int], list[str]]:
        """Return the words that name a term by themselves, by first letter and length of stem."""
        single_words: dict[tuple[str, int], list[str]] = defaultdict(list)
        if len(self.terms) > _MAX_MISTYPED:
            return single_words
        phrases = [phrase for same, _ in english().synonyms for phrase in same]
        for phrase in dict.fromkeys((*names, *phrases)):
            if len(phrase) == 1 and len(phrase[0]) >= _MIN_MISTYPED and (stem(phrase[0]),) in self.phrases:
                single_words[phrase[0][0], len(stem(phrase[0]))].append(phrase[0])
        return single_words

    def mistyped(self, word: str) -> tuple[Term, float] | None:
        """Return the term that a word names but for one typing error."""
        if len(word) < _MIN_MISTYPED - 1:
            return None
        lengths = range(len(stem(word)) - 2, len(stem(word)) + 3)
        known = (candidate for length in lengths for candidate in self._single_words.get((word[0], length), ()))
        match = next(
            (
                candidate
                for candidate in known
                if is_one_error(word, candidate) or is_one_error(stem(word), stem(candidate))
            ),
            None,
        )
        return None if match is None else self.phrases[(stem(match),)]

    def abbreviation(self, words: Sequence[str]) -> Term | None:
        """Return the term whose abbreviated name ("sci-fi") these two words ("science fiction") write out."""
        for parts, term in self._abbreviated:
            if all(word.startswith(part) for word, part in zip(words, parts, strict=True)):
                return term
        return None


@lru_cache(_NUM_KEPT)
def is_name(value: str) -> bool:
    """Whether a value names anything: not "unknown" or "other"."""
    words = words_of(value)
    return bool(words) and "".join(words) not in english().nameless


def _phrases_of(names: dict[Term, tuple[str, ...]]) -> dict[tuple[str, ...], tuple[Term, float]]:
    terms: dict[tuple[str, ...], tuple[Term, float]] = {}
    num_names = Counter(stem(word) for words in names.values() for word in set(words))
    for term, words in names.items():
        terms.setdefault(stems(words), (term, 1.0))
        if 1 < len(words) <= 3:
            terms.setdefault(("".join(words),), (term, 1.0))
            for word in words:
                if num_names[stem(word)] == 1 and len(word) >= _SHORT and not is_stop(word):
                    terms.setdefault((stem(word),), (term, 1.0))
    _add_synonyms(terms)
    return {phrase: term for phrase, term in terms.items() if phrase}


def _add_synonyms(terms: dict[tuple[str, ...], tuple[Term, float]]) -> None:
    """Let each group of synonyms name the value that one of its phrases names."""
    for same, near in english().synonyms:
        named = [terms[phrase][0] for phrase in map(stems, same) if phrase in terms and terms[phrase][1] == 1]
        if named:
            for phrases, certainty in ((same, _SAME), (near, _NEAR)):
                for phrase in phrases:
                    terms.setdefault(stems(phrase), (named[0], certainty))
