"""Reads a wish by the catalogue's own words and by clauses. Numpy only; no torch.

Reading adds scores to a model's log-probabilities: a wanted value, date or title word raises its items, an example
raises similar items. An exclusion that is stated without doubt and names a value of the catalogue becomes a mask; other
dislikes lower scores.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from models.catalogue import Catalogue
from models.similar import NONE, SimilarTable
from models.wishes.clauses import ClauseOfWish, Polarity, clauses_of
from models.wishes.dates import Dates, find_dates
from models.wishes.reading import Exclusion, Reading, Understood
from models.wishes.vocabulary import Term, Vocabulary, WishItem
from models.wishes.words import is_stop, tokens_of

MAX_CHARS = 400
YEAR = "year"
_CERTAIN = 0.8


@dataclass(frozen=True, slots=True)
class Weights:
    """What each part of a reading adds to log-probabilities; validation chooses these."""

    value: float = 5.0
    date: float = 5.0
    word: float = 3.0
    liked: float = 5.0
    less: float = 3.0
    earlier: float = 0.8
    """Factor for each later wish of a conversation."""
    personal: float = 1.0


@dataclass(slots=True)
class _Wishes:
    """The parts of a conversation's wishes that are in force; the newest wins."""

    values: dict[Term, tuple[Polarity, float]] = field(default_factory=dict)
    dates: list[tuple[Polarity, Dates, float]] = field(default_factory=list)
    examples: dict[int, tuple[Polarity, float]] = field(default_factory=dict)
    words: list[tuple[Polarity, tuple[str, ...], float]] = field(default_factory=list)

    def aged(self, factor: float) -> None:
        """Multiply all weights."""
        self.values = {term: (polarity, weight * factor) for term, (polarity, weight) in self.values.items()}
        self.dates = [(polarity, dates, weight * factor) for polarity, dates, weight in self.dates]
        self.examples = {item: (polarity, weight * factor) for item, (polarity, weight) in self.examples.items()}
        self.words = [(polarity, words, weight * factor) for polarity, words, weight in self.words]


class Reader:
    """Reads wishes for the items of one bundle. Thread-safe."""

    def __init__(
        self, vocabulary: Vocabulary, similar: SimilarTable | None = None, weights: Weights | None = None
    ) -> None:
        self._vocabulary, self._similar, self.weights = vocabulary, similar, weights or Weights()

    @classmethod
    def load(cls, folder: Path, catalogue: Catalogue, similar: SimilarTable | None = None) -> "Reader":
        """Read the folder `wishes` of a bundle; without it, the catalogue's own words are read.

        `similar` are the bundle's similar items, for wishes that name an example. Raises BundleCorrupt.
        """
        rows = zip(catalogue.item_ids, catalogue.titles, catalogue.categories, strict=True)
        return cls(Vocabulary([WishItem(*row) for row in rows]), similar)

    def with_items(self, items: Iterable[WishItem]) -> "Reader":
        """Return a reader that knows these items too: a known id is replaced, other items follow in the given order."""
        by_id = {item.item_id: item for item in self._vocabulary.items} | {item.item_id: item for item in items}
        return Reader(Vocabulary(list(by_id.values()), self._vocabulary.synonyms), self._similar, self.weights)

    @property
    def num_items(self) -> int:
        """The number of items of a reading."""
        return len(self._vocabulary.items)

    def read(self, text: str, session_wishes: Sequence[str] = ()) -> Reading:
        """Read a wish. `session_wishes` are earlier wishes of the conversation, oldest first; the newest wins."""
        wishes = _Wishes()
        for one in (*session_wishes, text):
            wishes.aged(self.weights.earlier)
            for clause in clauses_of(tokens_of(one[:MAX_CHARS])):
                self._read_clause(clause, wishes)
        return self._reading(wishes)

    def _read_clause(self, clause: ClauseOfWish, wishes: _Wishes) -> None:
        tokens, polarity, at = clause.tokens, clause.polarity, 0
        wanted = _wanted(polarity)
        new_values: dict[Term, tuple[Polarity, float]] = {}
        left: list[str] = []
        while at < len(tokens):
            if (title := self._title_at(clause, at)) is not None:
                liked = polarity if polarity in (Polarity.LIKE, Polarity.UNLIKE) else wanted
                wishes.examples[title[0]] = (liked, 1.0)
                at += title[1]
            elif (term := self._vocabulary.find_term(tokens, at)) is not None:
                new_values[term[0]] = (wanted, term[1])
                at += term[2]
            elif (dates := find_dates(tokens, at)) is not None:
                if not any(polarity != wanted for polarity, *_ in wishes.dates):
                    wishes.dates = []
                wishes.dates.append((wanted, dates[0], 1.0))
                at += dates[1]
            else:
                left.append(tokens[at].text)
                at += 1
        if clause.is_replacement and any(wanted == Polarity.WANT for wanted, _ in new_values.values()):
            wishes.values = {term: one for term, one in wishes.values.items() if one[0] != Polarity.WANT or one[1] == 1}
        wishes.values |= new_values
        if words := tuple(word for word in left if not is_stop(word) and word.isalnum()):
            wishes.words.append((wanted, words, 1.0))

    def _title_at(self, clause: ClauseOfWish, at: int) -> tuple[int, int] | None:
        """Return the item whose title is at a token, and the number of tokens.

        A title of one word counts only as an example, in quotes, or as the whole clause.
        """
        found = self._vocabulary.find_title(clause.tokens, at)
        if found is None:
            return None
        indices, length = found
        tokens = clause.tokens
        words = [token.text for token in tokens[at : at + length] if token.is_word]
        ends = at + length == len(tokens) or not tokens[at + length].is_word
        is_quoted = at > 0 and tokens[at - 1].text == '"'
        is_example = clause.polarity in (Polarity.LIKE, Polarity.UNLIKE)
        if not is_quoted and len([word for word in words if not is_stop(word)]) < 2:
            starts = at == 0 or all(one.text in ("the", "movie", "film", "or", "and", ",") for one in tokens[:at])
            if not (is_example and (ends or tokens[at].is_capital) and (starts or tokens[at].is_capital)):
                return None
            if self._vocabulary.find_term(tokens, at) is not None and not tokens[at].is_capital:
                return None
        return indices[0], length

    def _reading(self, wishes: _Wishes) -> Reading:
        vocabulary, weights = self._vocabulary, self.weights
        scores_V = np.zeros(self.num_items, dtype=np.float32)
        excluded_V = np.zeros(self.num_items, dtype=bool)
        must: list[str] = []
        must_not: list[str] = []
        exclusions: list[Exclusion] = []
        for term, (polarity, certainty) in wishes.values.items():
            mask_V = vocabulary.mask_of(term)
            if polarity == Polarity.WANT:
                scores_V += weights.value * certainty * mask_V
                must.append(term.value)
            elif polarity == Polarity.AVOID and certainty >= _CERTAIN:
                excluded_V |= mask_V
                must_not.append(term.value)
                exclusions.append(Exclusion(term.attribute, (term.value,)))
            else:
                scores_V -= weights.less * certainty * mask_V
        for polarity, dates, weight in wishes.dates:
            fits_V = vocabulary.dates_scores(dates)
            if polarity == Polarity.WANT:
                scores_V += weights.date * weight * fits_V
                must.append(dates.label)
            elif polarity == Polarity.AVOID and not dates.relative:
                excluded_V |= fits_V > 0
                must_not.append(dates.label)
                exclusions.append(Exclusion(YEAR, (), dates.first, dates.last))
            else:
                scores_V -= weights.less * weight * fits_V
        liked = self._add_examples(wishes, scores_V)
        for polarity, words, weight in wishes.words:
            found_V = vocabulary.words_scores(words)
            if found_V is not None:
                scores_V += (weights.word if polarity == Polarity.WANT else -weights.less / 3) * weight * found_V
        return _made(Understood(tuple(must), tuple(must_not), liked), scores_V, excluded_V, exclusions, weights)

    def _add_examples(self, wishes: _Wishes, scores_V: np.ndarray) -> tuple[str, ...]:
        liked = []
        for item, (polarity, weight) in wishes.examples.items():
            near_V = self._near(item)
            if polarity in (Polarity.LIKE, Polarity.WANT):
                scores_V += self.weights.liked * weight * near_V
                liked.append(self._vocabulary.items[item].title)
            else:
                scores_V -= self.weights.less * weight * near_V
            if polarity == Polarity.WANT:
                scores_V[item] += self.weights.value
        return tuple(liked)

    def _near(self, item: int) -> np.ndarray:
        """Return (V,) float32 from 0 to 1: similarity to an item, by the bundle's table or else by categories."""
        near_V = np.zeros(self.num_items, dtype=np.float32)
        own = self._vocabulary.items[item].categories
        for value in own:
            near_V += self._vocabulary.mask_of(Term("categories", value)) * np.float32(0.3 / len(own))
        if self._similar is not None and item < len(self._similar.neighbours_VN):
            neighbours_N, scores_N = self._similar.neighbours_VN[item], self._similar.scores_VN[item]
            kept = neighbours_N != NONE
            if kept.any():
                near_V[neighbours_N[kept]] += 0.7 * scores_N[kept] / max(1e-6, float(scores_N[kept].max()))
        near_V[item] = 0
        return near_V


def _wanted(polarity: Polarity) -> Polarity:
    """Return how a clause regards values: as examples do, it wants or avoids them."""
    return {Polarity.LIKE: Polarity.WANT, Polarity.UNLIKE: Polarity.LESS}.get(polarity, polarity)


def _made(
    understood: Understood,
    scores_V: np.ndarray,
    excluded_V: np.ndarray,
    exclusions: Sequence[Exclusion],
    weights: Weights,
) -> Reading:
    scores = scores_V if scores_V.any() else None
    excluded = excluded_V if exclusions and not excluded_V.all() else None
    is_read = scores is not None or excluded is not None
    named = replace(understood, reader="keywords" if is_read else "")
    return Reading(named, scores, excluded, tuple(exclusions), weights.personal)
