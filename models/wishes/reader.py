"""Reads a wish: the catalogue's own words by clauses, and with an encoder the meaning of other words. No torch.

Reading adds scores to a model's log-probabilities: a wanted value, date or title word raises its items, an example
raises similar items. An exclusion that is stated without doubt and names a value of the catalogue becomes a mask; other
dislikes lower scores.

    <bundle>/wishes/reader.json    {weights: chosen by validation}
                    ...            with an encoder, the files of meaning.py and the encoder's own
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
from pydantic import Field

from models.catalogue import Catalogue, ItemTexts
from models.documents import Finite, Schema, decode
from models.similar import NONE, SimilarTable
from models.wishes.clauses import Polarity
from models.wishes.meaning import LoadEncoder, Meaning, load_meaning
from models.wishes.reading import Exclusion, Reading, ReadTerms
from models.wishes.vocabulary import Term, Vocabulary, WishItem
from models.wishes.wants import Wants, read_wants

ABOUT = "reader.json"
YEAR = "year"
CERTAIN = 0.8
"""Minimum certainty of a value's name to exclude its items."""
_NUM_NEAR = 50.0
"""Similar items of an example that count in full; the count falls by half there."""
_BESIDE = 0.25
_VOCABULARIES: WeakKeyDictionary[ItemTexts, Vocabulary] = WeakKeyDictionary()
"""The vocabularies in use: reading 2,000 items takes 0.15 s, most of a bundle's load."""
_LIKED, _WANTED = (Polarity.LIKE, Polarity.WANT), (Polarity.WANT,)


@dataclass(frozen=True, slots=True)
class Weights:
    """What each part of a reading adds to log-probabilities; validation chooses these.

    `less_` are for dislikes. `earlier` is a factor for each later wish of a conversation, `personal` the weight of the
    model's log-probabilities.
    """

    value: float = 6.0
    date: float = 6.0
    word: float = 2.0
    liked: float = 5.0
    meaning: float = 1.0
    text: float = 0.15
    less_value: float = 3.0
    less_liked: float = 3.0
    less_meaning: float = 2.0
    earlier: float = 0.9
    personal: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """A reading before weights: scores (V,) float32 by the names of `Weights`, negative for dislikes."""

    understood: ReadTerms
    scores: Mapping[str, np.ndarray]
    excluded: np.ndarray | None
    exclusions: tuple[Exclusion, ...]

    def reading(self, weights: Weights) -> Reading:
        """Return the reading with these weights."""
        weighted = [np.float32(getattr(weights, name)) * scores_V for name, scores_V in self.scores.items()]
        scores: np.ndarray | None = np.sum(np.stack(weighted), axis=0) if weighted else None
        return Reading(self.understood, scores, self.excluded, self.exclusions, weights.personal)


class Reader:
    """Reads wishes for the items of one bundle. Thread-safe."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        similar: SimilarTable | None = None,
        weights: Weights | None = None,
        meaning: Meaning | None = None,
    ) -> None:
        self.vocabulary, self.weights = vocabulary, weights or Weights()
        self._similar, self.meaning = similar, meaning

    @classmethod
    def load(
        cls,
        folder: Path,
        catalogue: Catalogue,
        similar: SimilarTable | None = None,
        load_encoder: LoadEncoder = lambda _: None,
    ) -> "Reader":
        """Read the folder `wishes` of a bundle; without it, the catalogue's own words are read.

        `similar` are the bundle's similar items, for wishes that name an example. Raises BundleCorrupt.
        """
        vocabulary, num_items = _vocabulary_of(catalogue.texts), len(catalogue.item_ids)
        return cls(vocabulary, similar, load_weights(folder), load_meaning(folder, num_items, load_encoder))._prepared()

    def with_items(self, items: Sequence[WishItem]) -> "Reader":
        """Return a reader that knows these items too: a known id is replaced, other items follow in the given order."""
        place_of = {item.item_id: index for index, item in enumerate(self.vocabulary.items)}
        changed = {place_of.setdefault(item.item_id, len(place_of)): item for item in items}
        vocabulary, meaning = self.vocabulary.with_items(changed), self.meaning
        if meaning is not None and changed:
            meaning = meaning.with_items([*changed.values()], [*changed], len(place_of))
        return Reader(vocabulary, self._similar, self.weights, meaning)._prepared()

    def _prepared(self) -> "Reader":
        """Build the indexes that the first wish would otherwise wait for."""
        self.read("unknown word")
        return self

    @property
    def num_items(self) -> int:
        return len(self.vocabulary.items)

    def read(self, text: str, session_wishes: Sequence[str] = ()) -> Reading:
        """Read a wish. `session_wishes` are earlier wishes of the conversation, oldest first; the newest wins."""
        return self.parts(text, session_wishes).reading(self.weights)

    def parts(self, text: str, session_wishes: Sequence[str] = ()) -> Parts:
        """Return the parts of a reading."""
        return self.parts_of(read_wants(self.vocabulary, text, session_wishes, self.weights.earlier))

    def parts_of(self, wants: Wants) -> Parts:
        """Return the parts of what a wish wants and refuses."""
        total = _Sum(self.num_items)
        self._add_values(wants, total)
        self._add_dates(wants, total)
        liked = self._add_examples(wants, total)
        reader = "keywords" if total.scores or total.exclusions else ""
        self._add_words(wants, total)
        if self.meaning is not None and self._add_meaning(self.meaning, wants, total):
            reader = "encoder"
        reader = reader or ("keywords" if total.scores else "")
        has_mask = bool(total.exclusions) and not total.excluded_V.all()
        return Parts(
            ReadTerms(tuple(total.must), tuple(total.must_not), liked, reader),
            {name: scores_V for name, scores_V in total.scores.items() if scores_V.any()},
            total.excluded_V if has_mask else None,
            tuple(total.exclusions),
        )

    def _add_values(self, wants: Wants, total: "_Sum") -> None:
        for term, (polarity, weight) in wants.values.items():
            mask_V = self.vocabulary.mask_of(term)
            if polarity in _WANTED:
                total.add("value", weight * mask_V)
                total.must.append(term.value)
            elif polarity == Polarity.AVOID and weight >= CERTAIN:
                total.exclude(mask_V, term.value, Exclusion(term.attribute, (term.value,)))
            else:
                total.add("less_value", -weight * mask_V)

    def _add_dates(self, wants: Wants, total: "_Sum") -> None:
        for polarity, dates, weight in wants.dates:
            fits_V = self.vocabulary.dates_scores(dates)
            if polarity in _WANTED:
                total.add("date", weight * fits_V)
                total.must.append(dates.label)
            elif polarity == Polarity.AVOID and not dates.relative:
                total.exclude(fits_V > 0, dates.label, Exclusion(YEAR, (), dates.first, dates.last))
            else:
                total.add("less_value", -weight * fits_V)

    def _add_examples(self, wants: Wants, total: "_Sum") -> tuple[str, ...]:
        liked = []
        for item, (polarity, weight) in wants.examples.items():
            near_V = self._near(item)
            if polarity in _LIKED:
                total.add("liked", weight * near_V)
                liked.append(self.vocabulary.items[item].title)
            else:
                total.add("less_liked", -weight * near_V)
        for item in wants.titles:
            total.add("value", np.eye(1, self.num_items, item, dtype=np.float32)[0])
        return tuple(liked)

    def _near(self, item: int) -> np.ndarray:
        """Return (V,) from 0 to 1: whether items are among an item's most similar, or else share its categories."""
        near_V = np.zeros(self.num_items, dtype=np.float32)
        if self._similar is not None and item < len(self._similar.neighbours_VN):
            neighbours_N = self._similar.neighbours_VN[item]
            neighbours_N = neighbours_N[neighbours_N != NONE]
            near_V[neighbours_N] = 1 / (1 + (np.arange(len(neighbours_N)) / _NUM_NEAR) ** 4)
        if not near_V.any():
            own = self.vocabulary.items[item].categories
            for value in own:
                near_V += self.vocabulary.mask_of(Term("categories", value)) / np.float32(len(own))
        near_V[item] = 0
        return near_V

    def _add_words(self, wants: Wants, total: "_Sum") -> None:
        """Raise the items that have all other words of a clause; next to named values, words count little."""
        beside = _BESIDE if total.scores else 1.0
        for polarity, words, weight in wants.words:
            scores_V = self.vocabulary.words_scores(words)
            if scores_V is not None and polarity in _WANTED:
                total.add("word", beside * weight * scores_V**2)

    def _add_meaning(self, meaning: Meaning, wants: Wants, total: "_Sum") -> bool:
        """Add the meaning of clauses with other words; return whether there are any."""
        if not wants.clauses:
            return False
        read = meaning.read([text for _, text, _ in wants.clauses], self.vocabulary)
        for (polarity, _, weight), by_value_V, by_text_V in zip(wants.clauses, *read, strict=True):
            if polarity in _LIKED:
                total.add("meaning", weight * by_value_V)
                total.add("text", weight * by_text_V)
            else:
                total.add("less_meaning", -weight * np.maximum(by_value_V, 0))
        return True


def _vocabulary_of(texts: ItemTexts) -> Vocabulary:
    """Return the vocabulary of a catalogue's texts, which bundles with equal texts share."""
    vocabulary = _VOCABULARIES.get(texts)
    if vocabulary is None:
        rows = zip(texts.item_ids, texts.titles, texts.categories, strict=True)
        vocabulary = _VOCABULARIES[texts] = Vocabulary([WishItem(*row) for row in rows])
    return vocabulary


class _Sum:
    """The parts of a reading, being added."""

    def __init__(self, num_items: int) -> None:
        self.scores: dict[str, np.ndarray] = {}
        self.excluded_V = np.zeros(num_items, dtype=bool)
        self.must: list[str] = []
        self.must_not: list[str] = []
        self.exclusions: list[Exclusion] = []

    def add(self, name: str, scores_V: np.ndarray) -> None:
        before_V = self.scores.get(name)
        own_V = scores_V.astype(np.float32)
        self.scores[name] = own_V if before_V is None else before_V + own_V

    def exclude(self, mask_V: np.ndarray, label: str, exclusion: Exclusion) -> None:
        self.excluded_V |= mask_V
        self.must_not.append(label)
        self.exclusions.append(exclusion)


class _About(Schema):
    weights: dict[str, Finite] = Field(default_factory=dict)


def load_weights(folder: Path) -> Weights:
    """Return the weights of a reader's folder; the defaults in a folder without them. Raises BundleCorrupt."""
    path = folder / ABOUT
    if not path.exists():
        return Weights()
    known = {field.name for field in fields(Weights)}
    about, _ = decode(path.read_bytes(), _About, str(path))
    return Weights(**{name: weight for name, weight in about.weights.items() if name in known})


def weights_record(weights: Weights) -> dict[str, float]:
    return asdict(weights)
