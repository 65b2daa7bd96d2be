"""The words that name items in wishes: categories, title words, whole titles, years and popularity.

All of them come from the items. A category is matched by its name, by a word that only its name has, by abbreviation
("sci-fi" and "science fiction"), by synonyms in English, and despite one typing error. Numpy only.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from models.wishes.dates import Dates, year_in_title
from models.wishes.language import english
from models.wishes.titles import Titles
from models.wishes.words import Token, is_one_error, is_stop, stem, stems, words_of

_MAX_PHRASE = 6
_SHORT = 4
_SAME, _NEAR = 0.9, 0.6
"""Certainty of synonyms: only the first exclude items."""
_MIN_MISTYPED, _MAX_MISTYPED = 5, 5_000
"""Minimum letters of a name for correction, and maximum values of a catalogue for correction."""
_OLD_YEARS, _RECENT_YEARS = (10.0, 25.0), (2.0, 6.0)
"""Ages in years before the newest item: an item begins to be old, is old; is recent, is no longer recent."""


@dataclass(frozen=True, slots=True)
class WishItem:
    """The words of an item: as in a catalogue, with texts of attributes by name."""

    item_id: str
    title: str
    categories: tuple[str, ...] = ()
    attributes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Term:
    """A value that a wish names: an attribute's text, whose items are known."""

    attribute: str
    value: str


class Vocabulary:
    """The terms of a catalogue's items. Thread-safe for reading."""

    def __init__(self, items: Sequence[WishItem]) -> None:
        self.items = items
        self.years_V = np.array([year_in_title(item.title) for item in items], dtype=np.int32)
        members: dict[Term, list[int]] = defaultdict(list)
        for index, item in enumerate(items):
            for attribute, values in (("categories", item.categories), *item.attributes.items()):
                for value in values:
                    members[Term(attribute, value)].append(index)
        self.items_of = {term: np.array(indices) for term, indices in members.items() if _is_name(term.value)}
        self._phrases = self._index_phrases()

    def _index_phrases(self) -> dict[tuple[str, ...], tuple[Term, float]]:
        """Return terms and certainties by the stems of their names, of single words, abbreviations and synonyms."""
        found: dict[tuple[str, ...], tuple[Term, float]] = {}
        names = {term: words_of(term.value) for term in self.items_of}
        num_names = Counter(stem(word) for words in names.values() for word in set(words))
        for term, words in names.items():
            found.setdefault(stems(words), (term, 1.0))
            if 1 < len(words) <= 3:
                found.setdefault(("".join(words),), (term, 1.0))
                for word in words:
                    if num_names[stem(word)] == 1 and len(word) >= _SHORT and not is_stop(word):
                        found.setdefault((stem(word),), (term, 1.0))
        self._add_synonyms(found)
        return {phrase: term for phrase, term in found.items() if phrase}

    def _add_synonyms(self, found: dict[tuple[str, ...], tuple[Term, float]]) -> None:
        """Let each group of synonyms name the value that one of its phrases names."""
        for same, near in english().synonyms:
            named = [found[phrase][0] for phrase in map(stems, same) if phrase in found and found[phrase][1] == 1]
            if named:
                for phrases, certainty in ((same, _SAME), (near, _NEAR)):
                    for phrase in phrases:
                        found.setdefault(stems(phrase), (named[0], certainty))

    @cached_property
    def _abbreviated(self) -> list[tuple[tuple[str, ...], Term]]:
        names = ((words_of(term.value), term) for term in self.items_of)
        return [(words, term) for words, term in names if len(words) == 2 and max(map(len, words)) < _SHORT]

    @cached_property
    def titles(self) -> Titles:
        return Titles([item.title for item in self.items])

    @cached_property
    def _words(self) -> dict[str, np.ndarray]:
        """Items by the stem of each word of their titles and attributes."""
        found: dict[str, list[int]] = defaultdict(list)
        for index, item in enumerate(self.items):
            texts = (item.title, *(value for values in item.attributes.values() for value in values))
            for word in {stem(word) for text in texts for word in words_of(text) if not is_stop(word)}:
                found[word].append(index)
        return {word: np.array(indices) for word, indices in found.items()}

    def find_term(self, tokens: Sequence[Token], at: int) -> tuple[Term, float, int] | None:
        """Return the term of the longest name at a token, its certainty, and the number of tokens."""
        words = []
        for token in tokens[at : at + _MAX_PHRASE]:
            if not token.is_word:
                break
            words.append(token.text)
        for length in range(len(words), 0, -1):
            if length == 1 and is_stop(words[0]):
                return None
            if match := self._phrases.get(stems(words[:length])):
                return *match, length
            if length == 2 and (term := self._abbreviation(words[:2])):
                return term, 1.0, 2
        return (*match, 1) if words and (match := self._mistyped(words[0])) else None

    def certainty(self, tokens: Sequence[Token], at: int) -> float:
        """Return how certainly a value is named at a token: 1 by its own name, 0 not at all."""
        match = self.find_term(tokens, at)
        return 0.0 if match is None else match[1]

    def _mistyped(self, word: str) -> tuple[Term, float] | None:
        """Return the term that a word names but for one typing error; None for a word of titles and a stop word."""
        if len(word) < _MIN_MISTYPED - 1 or is_stop(word) or stem(word) in self._words:
            return None
        lengths = range(len(stem(word)) - 2, len(stem(word)) + 3)
        known = (one for length in lengths for one in self._single_words.get((word[0], length), ()))
        match = next((one for one in known if is_one_error(word, one) or is_one_error(stem(word), stem(one))), None)
        return None if match is None else self._phrases[(stem(match),)]

    @cached_property
    def _single_words(self) -> dict[tuple[str, int], list[str]]:
        """The words that name a term by themselves, by first letter and length of stem."""
        found: dict[tuple[str, int], list[str]] = defaultdict(list)
        if len(self.items_of) > _MAX_MISTYPED:
            return found
        names = [words_of(term.value) for term in self.items_of]
        phrases = [phrase for same, _ in english().synonyms for phrase in same]
        for phrase in dict.fromkeys((*names, *phrases)):
            if len(phrase) == 1 and len(phrase[0]) >= _MIN_MISTYPED and (stem(phrase[0]),) in self._phrases:
                found[phrase[0][0], len(stem(phrase[0]))].append(phrase[0])
        return found

    def _abbreviation(self, words: Sequence[str]) -> Term | None:
        for parts, term in self._abbreviated:
            if all(word.startswith(part) for word, part in zip(words, parts, strict=True)):
                return term
        return None

    def words_scores(self, words: Sequence[str]) -> np.ndarray | None:
        """Return (V,) float32 from 0 to 1: the share of these words, by rarity, in each item's title and attributes."""
        found = [items for word in words if not is_stop(word) and (items := self._words.get(stem(word))) is not None]
        known = [(items, np.log(1 + len(self.items) / len(items))) for items in found]
        if not known:
            return None
        scores_V = np.zeros(len(self.items), dtype=np.float32)
        for items, rarity in known:
            scores_V[items] += rarity
        scores_V /= np.float32(sum(rarity for _, rarity in known))
        return scores_V

    def dates_scores(self, dates: Dates) -> np.ndarray:
        """Return (V,) float32 from 0 to 1: how well each item's year fits; 0 for an item without a year."""
        years_V = self.years_V
        if not dates.relative:
            fits_V = (years_V >= dates.first) & (years_V <= dates.last) & (years_V > 0)
            return fits_V.astype(np.float32)
        age_V = np.max(years_V, initial=0) - years_V.astype(np.float32)
        begins, ends = _OLD_YEARS if dates.relative == "old" else _RECENT_YEARS
        old_V = np.clip((age_V - begins) / (ends - begins), 0, 1)
        scores_V: np.ndarray = np.where(years_V > 0, old_V if dates.relative == "old" else 1 - old_V, 0)
        return scores_V.astype(np.float32)

    def mask_of(self, term: Term) -> np.ndarray:
        """Return the items (V,) bool with this value."""
        mask = np.zeros(len(self.items), dtype=bool)
        mask[self.items_of.get(term, [])] = True
        return mask


def _is_name(value: str) -> bool:
    words = words_of(value)
    return bool(words) and "".join(words) not in english().nameless
