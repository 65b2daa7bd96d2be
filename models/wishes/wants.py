"""The wanted and refused parts of a conversation's wishes: values, dates, examples, and other words. Pure.

Wishes are read oldest first. A newer wish replaces what it contradicts: a value by its polarity, dates by newer dates,
and after "actually" or "instead" all wanted values.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from models.wishes.clauses import ClauseOfWish, Polarity, clauses_of
from models.wishes.dates import Dates, find_dates
from models.wishes.language import english
from models.wishes.vocabulary import Term, Vocabulary
from models.wishes.words import Token, is_stop, tokens_of

MAX_CHARS = 400
"""Characters of a wish that are read."""
_MAX_TITLE_QUERY = 2
"""A wish of a title and at most this many other words asks for the item itself."""


@dataclass(slots=True)
class Wants:
    """The parts in force, each with its polarity and weight; newer parts weigh more.

    `words` and `clauses` hold what names no value: single words, and the whole text of their clause. `titles` are items
    that a wish asks for by title.
    """

    values: dict[Term, tuple[Polarity, float]] = field(default_factory=dict)
    dates: list[tuple[Polarity, Dates, float]] = field(default_factory=list)
    examples: dict[int, tuple[Polarity, float]] = field(default_factory=dict)
    titles: list[int] = field(default_factory=list)
    words: list[tuple[Polarity, tuple[str, ...], float]] = field(default_factory=list)
    clauses: list[tuple[Polarity, str, float]] = field(default_factory=list)

    def aged(self, factor: float) -> "Wants":
        """Return the parts with all weights times a factor; exclusions keep their weight."""
        return Wants(
            {
                term: (polarity, weight if polarity == Polarity.AVOID else weight * factor)
                for term, (polarity, weight) in self.values.items()
            },
            [(polarity, dates, weight * factor) for polarity, dates, weight in self.dates],
            {item: (polarity, weight * factor) for item, (polarity, weight) in self.examples.items()},
            self.titles,
            [(polarity, words, weight * factor) for polarity, words, weight in self.words],
            [(polarity, text, weight * factor) for polarity, text, weight in self.clauses],
        )


def read_wants(vocabulary: Vocabulary, text: str, earlier: Sequence[str], factor: float) -> Wants:
    """Read a wish after earlier wishes; each later wish multiplies the weights of earlier ones by `factor`."""
    wants = Wants()
    for wish in (*earlier, text):
        wants = _read(vocabulary, wish[:MAX_CHARS], wants.aged(factor))
    return wants


def _read(vocabulary: Vocabulary, text: str, wants: Wants) -> Wants:
    tokens = vocabulary.titles.marked(tokens_of(text), vocabulary.certainty)
    is_title_query = sum(token.is_word and token.item < 0 for token in tokens) <= _MAX_TITLE_QUERY
    return add_clauses(vocabulary, clauses_of(tokens), wants, is_title_query=is_title_query)


def add_clauses(
    vocabulary: Vocabulary, given: Sequence[ClauseOfWish], wants: Wants, *, is_title_query: bool = False
) -> Wants:
    """Add what clauses name to the parts in force. `is_title_query`: their titles are what the wish asks for."""
    parts = [part for clause in given for part in _parts(vocabulary, clause)]
    clauses = [_read_clause(vocabulary, part) for part in parts]
    if any(clause.is_replacement and clause.wants for clause in clauses):
        wants.values = {term: want for term, want in wants.values.items() if want[0] != Polarity.WANT}
    if any(clause.dates for clause in clauses):
        wants.dates = []
    certainties: dict[Term, float] = {}
    for clause in clauses:
        for term, certainty in clause.values.items():
            if certainty >= certainties.get(term, 0.0):  # "horror without gore" is horror
                certainties[term] = certainty
                wants.values[term] = clause.polarity, certainty
        wants.dates.extend((clause.polarity, dates, 1.0) for dates in clause.dates)
        for item in clause.items:
            wants.examples[item] = clause.of_items, 1.0
            if is_title_query and clause.of_items == Polarity.WANT:
                wants.titles.append(item)
        if clause.left:
            wants.words.append((clause.polarity, clause.left, 1.0))
            wants.clauses.append((clause.polarity, clause.text, 0.5 if clause.values else 1.0))
    return wants


@dataclass(slots=True)
class _Clause:
    """The terms that a clause names. Examples have a polarity of their own; `left` are words that name nothing."""

    polarity: Polarity
    of_items: Polarity
    is_replacement: bool
    text: str = ""
    values: dict[Term, float] = field(default_factory=dict)
    dates: list[Dates] = field(default_factory=list)
    items: list[int] = field(default_factory=list)
    left: tuple[str, ...] = ()

    @property
    def wants(self) -> bool:
        return self.polarity == Polarity.WANT and bool(self.values)


def _parts(vocabulary: Vocabulary, clause: ClauseOfWish) -> list[ClauseOfWish]:
    """Split "not too scary horror films" after the first word that the polarity concerns."""
    tokens, at = clause.tokens, 0
    while at < len(tokens) and tokens[at].text in english().softeners:
        at += 1
    if not clause.is_adjective or at == len(tokens) or is_stop(tokens[at].text):
        return [clause]
    match = vocabulary.find_term(tokens, at)
    end = at + (1 if match is None else match[2])
    if end >= len(tokens) or not tokens[end].is_word or is_stop(tokens[end].text):
        return [clause]
    return [replace(clause, tokens=tokens[:end]), replace(clause, tokens=tokens[end:], polarity=Polarity.WANT)]


def _read_clause(vocabulary: Vocabulary, clause: ClauseOfWish) -> _Clause:
    tokens, at = clause.tokens, 0
    polarity = {Polarity.LIKE: Polarity.WANT, Polarity.UNLIKE: Polarity.LESS}.get(clause.polarity, clause.polarity)
    of_items = Polarity.UNLIKE if clause.polarity in (Polarity.AVOID, Polarity.LESS) else clause.polarity
    content = _Clause(polarity, of_items, clause.is_replacement)
    left: list[Token] = []
    while at < len(tokens):
        if tokens[at].item >= 0:
            content.items.append(tokens[at].item)
            at += 1
        elif (term := vocabulary.find_term(tokens, at)) is not None:
            content.values[term[0]] = max(term[1], content.values.get(term[0], 0.0))
            left.extend(tokens[at : at + term[2]] if term[1] < 1 else ())
            at += term[2]
        elif (dates := find_dates(tokens, at)) is not None:
            content.dates.append(dates[0])
            at += dates[1]
        else:
            left.append(tokens[at])
            at += 1
    content.left = tuple(token.text for token in left if token.is_word and not is_stop(token.text))
    content.text = " ".join(token.text for token in tokens if token.item < 0 and token.text != '"')
    return content
