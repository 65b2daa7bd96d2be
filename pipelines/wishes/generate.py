"""Writes wishes from a catalogue's own words, each for a labelled history and with the items that it means.

A wish is a phrasing of its kind with words that fit the label: a category, a decade, an item often seen together with
it. A reader who understood everything would limit a ranking to the meant items.

Shape suffix: V items.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files

import numpy as np

from models.wishes.titles import natural_title
from models.wishes.vocabulary import Vocabulary
from models.wishes.words import is_stop, words_of
from pipelines.data.examples import Cases

Phrasings = Mapping[str, Sequence[str]]
_MIN_ITEMS = 5
"""A wish means at least this many items."""
_NUM_LIKE = 50


@dataclass(frozen=True, slots=True, eq=False)
class Wish:
    """A wish of the user of a case, after earlier wishes of the conversation.

    `meant_V` marks the items that it means, `excluded_V` the items that it excludes; both (V,) bool. `words` fill its
    phrasing's slots.
    """

    kind: str
    case: int
    text: str
    session: tuple[str, ...]
    meant_V: np.ndarray
    excluded_V: np.ndarray
    words: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Words:
    """What wishes are written from: terms and years, near items, and words near a category that do not name it.

    `near_VN` are the items (V, N) most often seen together with each item, best first, -1 for padding.
    """

    vocabulary: Vocabulary
    near_VN: np.ndarray
    moods: Mapping[str, Sequence[str]]


def training_phrasings() -> Phrasings:
    """Return the phrasings that training and validation use."""
    phrasings: Phrasings = tomllib.loads(files("pipelines.wishes").joinpath("phrasings.toml").read_text())
    return phrasings


def write_wishes(cases: Cases, words: Words, phrasings: Phrasings, seed: int = 0) -> list[Wish]:
    """Return a wish of each kind for each case, where the label has what the kind names."""
    writer = _Writer(words, phrasings, np.random.default_rng(seed))
    return [wish for case, label in enumerate(cases.targets.tolist()) for wish in writer.write(case, label)]


class _Writer:
    def __init__(self, words: Words, phrasings: Phrasings, rng: np.random.Generator) -> None:
        self._words, self._phrasings, self._rng = words, phrasings, rng
        vocabulary = words.vocabulary
        self._masks = {
            term.value: vocabulary.mask_of(term)
            for term, items in vocabulary.items_of.items()
            if term.attribute == "categories" and len(items) >= _MIN_ITEMS
        }
        self._decades_V = vocabulary.years_V // 10 * 10

    def write(self, case: int, label: int) -> Iterator[Wish]:
        for kind, phrasings in self._phrasings.items():
            text = str(self._rng.choice(list(phrasings)))
            filled = self._fill(text, label)
            if filled is None:
                continue
            *session, last = filled[0].split("\n")
            meant_V, excluded_V, given = filled[1:]
            if meant_V[label] and (meant_V.sum() >= _MIN_ITEMS or "{words}" in text):
                yield Wish(kind, case, last, tuple(session), meant_V, excluded_V, given)

    def _fill(self, text: str, label: int) -> tuple[str, np.ndarray, np.ndarray, dict[str, str]] | None:
        """Return the text with words that fit the label, the meant and the excluded items, and the words.

        None without such words.
        """
        own = [value for value in self._words.vocabulary.items[label].categories if value in self._masks]
        own = [str(value) for value in self._rng.permutation(own)] if own else []
        meant_V = np.ones(len(self._decades_V), dtype=bool)
        excluded_V = np.zeros(len(self._decades_V), dtype=bool)
        given: dict[str, str] = {}
        for slot, wanted in (("a", own[:1]), ("b", own[1:2])):
            if f"{{{slot}}}" in text:
                if not wanted:
                    return None
                given[slot] = wanted[0].lower()
                meant_V &= self._masks[wanted[0]]
        if "{m}" in text:
            named = next((value for value in own if self._words.moods.get(value)), None)
            if named is None:
                return None
            given["m"] = str(self._rng.choice(list(self._words.moods[named])))
            meant_V &= self._masks[named]
        if "{x}" in text or "{n}" in text:
            excluded = self._excluded(own, meant_V, with_mood="{n}" in text)
            if excluded is None:
                return None
            given |= {"x": excluded.lower(), "n": str(self._rng.choice(list(self._words.moods.get(excluded, [""]))))}
            excluded_V = self._masks[excluded]
            meant_V &= ~excluded_V
        if "{date}" in text:
            decade = int(self._decades_V[label])
            if not decade:
                return None
            given["date"] = f"{decade}s" if self._rng.random() < 0.5 or decade >= 2000 else f"{decade % 100}s"
            meant_V &= self._decades_V == decade
        if "{words}" in text:
            rare = [word for word in words_of(self._words.vocabulary.items[label].title) if not is_stop(word)]
            if not rare:
                return None
            given["words"] = " ".join(rare[: int(self._rng.integers(1, 3))])
            meant_V &= np.arange(len(meant_V)) == label
        if "{title}" in text:
            example = self._example(label)
            if example is None:
                return None
            given["title"] = natural_title(self._words.vocabulary.items[example].title)
            near_N = self._words.near_VN[example][:_NUM_LIKE]
            is_near_V = np.zeros(len(meant_V), dtype=bool)
            is_near_V[near_N[near_N >= 0]] = True
            meant_V &= is_near_V
        words = {slot: word for slot, word in given.items() if f"{{{slot}}}" in text}
        return text.format(**given), meant_V, excluded_V, words

    def _excluded(self, own: Sequence[str], meant_V: np.ndarray, *, with_mood: bool) -> str | None:
        """Return a category that the label lacks, drawn by its share of the meant items."""
        names = [name for name in self._masks if name not in own and (not with_mood or self._words.moods.get(name))]
        shares = np.array([(self._masks[name] & meant_V).sum() for name in names], dtype=float)
        return str(self._rng.choice(names, p=shares / shares.sum())) if shares.sum() else None

    def _example(self, label: int) -> int | None:
        """Return an item that the label is near to; None without one."""
        near = self._words.near_VN[:, :_NUM_LIKE]
        examples = np.flatnonzero((near == label).any(axis=1))
        return int(self._rng.choice(examples)) if len(examples) else None
