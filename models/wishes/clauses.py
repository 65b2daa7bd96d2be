"""Splits a wish into wanted, unwanted and exemplary clauses, by words such as "no", "without" or "but".

A clause ends at punctuation or at a word of contrast. A list is a single clause: "no romance, drama or horror".
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from models.wishes.language import english
from models.wishes.refusals import ENDS, distance_around, num_behind, num_label, num_undoing, texts_of, words_until_end
from models.wishes.words import MINUS, Token, is_stop


class Polarity(StrEnum):
    """How a clause regards what it names."""

    WANT = "want"
    AVOID = "avoid"
    """Stated without doubt."""
    LESS = "less"
    """"not too", "less", "rather not": lowers scores and excludes nothing."""
    LIKE = "like"
    UNLIKE = "unlike"


@dataclass(frozen=True, slots=True)
class ClauseOfWish:
    """A run of tokens with one polarity."""

    polarity: Polarity
    tokens: tuple[Token, ...]
    is_replacement: bool = False
    """Whether the wish takes back what earlier wishes asked for: "actually", "instead"."""
    is_adjective: bool = False
    """Whether the polarity is that of the first word only, if others follow: "not too scary horror films"."""


_CONDITIONS = frozenset(["if", "when", "whenever", "once"])
_ALSO = frozenset(["only", "just", "merely", "simply"])
"""After "not", and before "but": "not only old films but new films"."""
_NOUNS = frozenset(["love"])
_ENGLISH_NOUNS = frozenset(["sin", "salvo", "pas"])
"""Nouns that exclude in another language."""
_BEFORE_NOUNS = frozenset(["about", "of", "the", "in", "with", "by", "against", "deadly", "original", "my", "our"])
_BEFORE_VERBS = frozenset(["do", "does", "did", "to", "and", "also", "really", "just", "always", "still", "absolutely"])


def clauses_of(tokens: Sequence[Token]) -> list[ClauseOfWish]:
    """Return the clauses of a wish in order; clauses without words are dropped."""
    return _Splitter(tokens).split()


class _Splitter:
    """Splits tokens from left to right; the current clause begins at `_begun` and has `_polarity`."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self._tokens = tokens
        self._is_replacement = _replaces(tokens)
        self._found: list[ClauseOfWish] = []
        self._polarity, self._begun, self._is_adjective = Polarity.WANT, 0, False
        self._is_list = False
        """Whether the clause is the list after a label: "Dislikes: war, horror."."""

    def split(self) -> list[ClauseOfWish]:
        at = 0
        while at < len(self._tokens):
            at = self._step(at)
        self._end(self._polarity, len(self._tokens))
        return self._found

    def _step(self, at: int) -> int:
        """Return the next token after what the token at `at` begins."""
        tokens, is_wanted = self._tokens, self._polarity in (Polarity.WANT, Polarity.LIKE)
        if (end := self._refusal(at, is_wanted=is_wanted)) is not None:
            return end
        if (cue := _cue_at(tokens, at) or self._comparison_at(at)) is not None:
            return self._begin(at, *cue)
        if not is_wanted and _is_resolve(tokens, at) and not self._says_nothing(at):  # "forget dramas I will take ..."
            self._end(self._polarity, at)
            self._polarity, self._begun = Polarity.WANT, at
        if tokens[at].text == "free" and tokens[at].is_joined and at > self._begun:  # "gore-free"
            return self._avoid_between(at - 1, at - 1, at) + 1
        if self._ends_here(at):
            self._end(self._polarity, at)
            self._polarity, self._begun = Polarity.WANT, at + 1
        return at + 1

    def _refusal(self, at: int, *, is_wanted: bool) -> int | None:
        """Apply a refusal of more than a cue that begins at a token, and return the next token; None without one."""
        tokens, token = self._tokens, self._tokens[at]
        if (length := num_undoing(tokens, at)) > 0:
            return self._undo(at, length)
        if self._begins_clause(at) and (length := num_label(tokens, at)) > 0:
            self._end(self._polarity, at)
            self._polarity, self._begun, self._is_list = Polarity.AVOID, at + length, True
            return self._begun
        if token.text in english().prefixes and at + 1 < len(tokens) and tokens[at + 1].is_joined:  # "non-violent"
            return self._avoid_between(at, at + 1, at + 2)
        if (distance := distance_around(tokens, at)) is not None:
            return self._avoid_between(at, at + 1, at + distance) + 1
        if is_wanted and (length := num_behind(tokens, self._begun, at)) > 0:
            self._end(Polarity.AVOID, at)
            self._begun = at + length
            return self._begun
        return None

    def _begin(self, at: int, cue: str, length: int) -> int:
        """Begin a clause after a cue."""
        end = at + length
        following = self._tokens[end].text if end < len(self._tokens) else ""
        goes_on = cue == "want" and self._polarity in (Polarity.AVOID, Polarity.LESS) and self._says_nothing(at)
        self._end(self._polarity, at)
        self._begun = end
        self._polarity = self._polarity if goes_on else _polarity(cue, self._polarity, following)
        first = self._tokens[at].text
        self._is_adjective = first == MINUS or (self._polarity == Polarity.LESS and first in ("not", "less", "least"))
        return end

    def _begins_clause(self, at: int) -> bool:
        return at == self._begun or not self._tokens[at - 1].is_word

    def _ends_here(self, at: int) -> bool:
        token = self._tokens[at]
        if self._is_list:
            return token.text in ENDS or token.text == "/"
        if token.text == "," and self._tokens[self._begun].text in _CONDITIONS and self._polarity == Polarity.WANT:
            return False  # "if it is a western, I switch off"
        return _ends_clause(self._tokens, at, self._polarity)

    def _undo(self, at: int, length: int) -> int:
        """Lower what the wish has asked for so far, and begin there."""
        self._end(self._polarity, at)
        self._found = [
            replace(clause, polarity=Polarity.LESS) if clause.polarity == Polarity.WANT else clause
            for clause in self._found
        ]
        self._polarity, self._begun = Polarity.WANT, at + length
        return self._begun

    def _says_nothing(self, at: int) -> bool:
        """Whether only words of requests are between the last cue and this cue: "do not show me"."""
        between = [token.text for token in self._tokens[self._begun : at]]
        return all(map(is_stop, between)) and between[:1] not in (["i"], ["we"])

    def _comparison_at(self, at: int) -> tuple[str, int] | None:
        """Return the cue of "than" or "over" after "rather" or "prefer" in the same sentence."""
        if self._tokens[at].text not in ("than", "over"):
            return None
        for token in reversed(self._tokens[:at]):
            if token.text in ENDS:
                return None
            if token.text in english().comparing:
                return "less", 1
        return None

    def _avoid_between(self, at: int, first: int, end: int) -> int:
        """End the clause at `at`, exclude the words from `first` to `end`, and begin there."""
        self._end(self._polarity, at)
        self._begun = first
        self._end(Polarity.AVOID, end)
        self._begun = end
        return end

    def _end(self, polarity: Polarity, at: int) -> None:
        tokens = tuple(self._tokens[self._begun : at])
        if any(token.is_word and token.text not in english().pronouns for token in tokens):
            self._found.append(ClauseOfWish(polarity, tokens, self._is_replacement, self._is_adjective))
        self._is_adjective = self._is_list = False


def _is_resolve(tokens: Sequence[Token], at: int) -> bool:
    """Whether a token begins "I will", "we would" and so on."""
    first, second = (*texts_of(tokens, at, 2), "", "")[:2]
    return first in ("i", "we") and second in ("will", "would", "could")


def _polarity(cue: str, before: Polarity, following: str) -> Polarity:
    """Return the polarity after a cue, given the polarity before it and the next word."""
    if cue == "skip":
        return before
    polarity = Polarity(cue)
    if polarity == Polarity.AVOID and following in english().softeners:
        return Polarity.LESS
    if polarity == Polarity.LIKE and before in (Polarity.AVOID, Polarity.LESS, Polarity.UNLIKE):
        return Polarity.UNLIKE
    return polarity


def _cue_at(tokens: Sequence[Token], at: int) -> tuple[str, int] | None:
    """Return the longest cue at a token, and its length."""
    cues, words = english().cues, [token.text for token in tokens[at : at + english().longest_cue]]
    for length in range(len(words), 0, -1):
        if (cue := cues.get(tuple(words[:length]))) is not None:
            if length == 1 and _is_noun(tokens, at):
                return None
            if words[0] == "not" and words[length - 1] in _ALSO and _corrects(tokens, at + length):
                return "want", length
            return cue, length
    return None


def _corrects(tokens: Sequence[Token], at: int) -> bool:
    """Whether the clause from this token ends at "but": "not only comedies but also dramas"."""
    end = at + len(words_until_end(tokens, at))
    following = [token.text for token in tokens[end : end + 2]]
    return "but" in following[: 2 if following[:1] == [","] else 1]


def _is_noun(tokens: Sequence[Token], at: int) -> bool:
    """Whether a word that is also a noun is one here, as in "love stories" and "films about sin"."""
    before = tokens[at - 1] if at else None
    if tokens[at].text in _ENGLISH_NOUNS:
        after = tokens[at + 1] if at + 1 < len(tokens) else None
        is_last = after is None or not after.is_word or is_stop(after.text)
        return is_last or (before is not None and before.text in _BEFORE_NOUNS)
    return tokens[at].text in _NOUNS and before is not None and before.is_word and before.text not in _BEFORE_VERBS


def _ends_clause(tokens: Sequence[Token], at: int, polarity: Polarity) -> bool:
    token = tokens[at]
    if token.text in ENDS or token.text in english().contrast:
        return True
    following = tokens[at + 1].text if at + 1 < len(tokens) else ""
    if token.text == ",":
        return polarity not in (Polarity.AVOID, Polarity.LESS) or not _list_goes_on(tokens, at + 1)
    is_exclusion = polarity not in (Polarity.WANT, Polarity.LIKE)
    return is_exclusion and token.text in english().conjunctions and following in english().restarts


def _list_goes_on(tokens: Sequence[Token], at: int) -> bool:
    """Whether the words after a comma continue a list that ends with "or", "nor" or the like."""
    first: list[str] = []
    for token in tokens[at:]:
        if token.text in ENDS or token.text in english().contrast:
            break
        first.append(token.text)
    if not first or first[0] in english().restarts:
        return False
    if first[0] in english().disjunctions:
        return True
    joints = [index for index, word in enumerate(first) if word in english().disjunctions]
    return bool(joints) and sum(not is_stop(word) and word != "," for word in first[: joints[0]]) <= 3


def _replaces(tokens: Sequence[Token]) -> bool:
    words = [token.text for token in tokens]
    for phrase in english().replacing:
        for at in range(len(words) - len(phrase) + 1):
            if tuple(words[at : at + len(phrase)]) == phrase and words[at + len(phrase) : at + len(phrase) + 1] != [
                "of"
            ]:
                return True
    return False
