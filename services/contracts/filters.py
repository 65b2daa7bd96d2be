"""Expressions over the attributes of items, in the shape of Qdrant's filters: `must`, `should` and `must_not`, nested.

    {"must": [{"key": "price", "range": {"lt": 20}}, {"should": [{"key": "brand", "in": ["Acme", "Umbra"]},
                                                                 {"key": "new", "eq": true}]}],
     "must_not": [{"key": "age_limit", "exists": true}]}

An item matches if all of `must` hold, at least one of `should` if there are any, and no `must_not`. A text
attribute may have several values; a match of any is enough. A missing attribute equals nothing and is in no range.
The key `item_id` is the item's own id.

Callers send a ConditionBody or an ExpressionBody, which decode to a Condition or an Expression with a canonical text,
used for comparison and caching. Does not know which attributes exist.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from services.contracts.message import Custom, Id, InvalidField, Message, convert_part, join

ITEM_ID = "item_id"
MAX_DEPTH = 5
MAX_CONDITIONS = 100
MAX_VALUES = 2_000
"""Maximum number of values over all conditions of one expression."""
_TEXTS_A_TEST = 250
"""This many text lookups take as long as one test."""
MOST_COMPARED = 32
"""Up to this many numbers of one condition are compared in turn; more are searched, at about the same cost."""
TESTS = ("eq", "in", "range", "exists")
_DIGEST_BYTES = 16
BRANCHES = ("must", "should", "must_not")
BOUNDS = ("gte", "gt", "lte", "lt")

_EXAMPLE = {"key": "categories", "eq": "Comedy"}

Value = str | float | bool
NOT_NULL = {"x-not-null": True}
"""Omits null from the JSON schema of a field that accepts it."""


class Clause(Custom):
    """A Condition or an Expression."""

    text: str
    num_tests: int

    @cached_property
    def digest(self) -> bytes:
        """The hash of the text: the key of cached results for the clause."""
        return blake2b(self.text.encode(errors="surrogatepass"), digest_size=_DIGEST_BYTES).digest()

    @classmethod
    def read(cls, plain: Any) -> "Clause":
        """Read one condition, or an expression in its place. Raises InvalidField."""
        if isinstance(plain, dict) and any(plain.get(name) is not None for name in BRANCHES):
            expression = convert_part(ExpressionBody, plain).as_expression()
            if expression is None:
                raise InvalidField("", "without any clause", "send at least one clause, or omit the expression")
            return expression
        return convert_part(ConditionBody, plain).condition

    @classmethod
    def forms(cls) -> tuple[type[Message], ...]:
        return ConditionBody, ExpressionBody


class Range(Message, frozen=True):
    """Bounds of a number, at least one."""

    extra_schema: ClassVar = {"minProperties": 1}

    gte: Annotated[float | None, Meta(description="At least", extra_json_schema=NOT_NULL)] = None
    gt: Annotated[float | None, Meta(description="More than, instead of gte", extra_json_schema=NOT_NULL)] = None
    lte: Annotated[float | None, Meta(description="At most", extra_json_schema=NOT_NULL)] = None
    lt: Annotated[float | None, Meta(description="Less than, instead of lte", extra_json_schema=NOT_NULL)] = None

    def __post_init__(self) -> None:
        """Check the bounds. Raises InvalidField."""
        super().__post_init__()
        for inclusive, exclusive in (("gte", "gt"), ("lte", "lt")):
            if getattr(self, inclusive) is not None and getattr(self, exclusive) is not None:
                raise InvalidField(exclusive, f"sent with {inclusive}", "send one of the two")


@dataclass(frozen=True, slots=True)
class OneOf:
    """Whether the attribute equals any of these values; `eq` is one value."""

    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Exists:
    """Whether the item has the attribute (`wanted`), or lacks it."""

    wanted: bool


Test = OneOf | Range | Exists


@dataclass(frozen=True)
class Condition(Clause):
    """One test of one attribute."""

    key: str = field(compare=False)
    test: Test = field(compare=False)
    text: str

    @cached_property
    def num_tests(self) -> int:  # type: ignore[override]
        """The cost in tests over every item: one, or one per number, and more for many texts."""
        if not isinstance(self.test, OneOf):
            return 1
        num_texts = sum(isinstance(value, str) for value in self.test.values)
        return min(max(1, len(self.test.values) - num_texts + num_texts // _TEXTS_A_TEST), MOST_COMPARED)

    @classmethod
    def of(cls, key: str, test: Test) -> "Condition":
        """Make a condition and its canonical text."""
        match test:
            case OneOf(values):
                tested = ",".join(sorted({repr(value) for value in values}))
            case Range():
                tested = "..".join(str(getattr(test, bound)) for bound in BOUNDS)
            case Exists(wanted):
                tested = str(wanted)
        return cls(key, test, f"{key!r} {type(test).__name__} {tested}")


_NO_BOUNDS = Range()


class ConditionBody(Message, frozen=True):
    """One test of one attribute: exactly one of `eq`, `in`, `range` and `exists`."""

    extra_schema: ClassVar = {"oneOf": [{"required": [test]} for test in TESTS]}

    key: Annotated[Id, Meta(description="The attribute's name, or `item_id`", examples=["categories"])]
    eq: Annotated[
        Id | float | bool | None,
        Meta(description="Equal to this value", examples=["Comedy"], extra_json_schema=NOT_NULL),
    ] = None
    in_: Annotated[
        Annotated[tuple[Id | float | bool, ...], Meta(min_length=1, max_length=MAX_VALUES)] | None,
        Meta(description="Equal to any of these values", extra_json_schema=NOT_NULL),
    ] = msgspec.field(default=None, name="in")
    range: Annotated[Range | None, Meta(description="A number within bounds", extra_json_schema=NOT_NULL)] = None
    exists: Annotated[
        bool | None, Meta(description="Whether the item has the attribute", extra_json_schema=NOT_NULL)
    ] = None

    def __post_init__(self) -> None:
        """Check that there is one test. Raises InvalidField."""
        super().__post_init__()
        if (self.eq is None) + (self.in_ is None) + (self.range is None) + (self.exists is None) != len(TESTS) - 1:
            sent = [name for name in TESTS if getattr(self, "in_" if name == "in" else name) is not None]
            problem = " and ".join(sent) + " together" if sent else "no test"
            raise InvalidField("", problem, f"send one of {', '.join(TESTS)}")
        if self.range is not None and self.range == _NO_BOUNDS:
            raise InvalidField("range", "without bounds", f"send one of {', '.join(BOUNDS)}, or two")

    @property
    def condition(self) -> "Condition":
        """The condition that it describes."""
        if self.eq is not None:
            return Condition.of(self.key, OneOf((self.eq,)))
        if self.in_ is not None:
            return Condition.of(self.key, OneOf(self.in_))
        return Condition.of(self.key, self.range if self.range is not None else Exists(bool(self.exists)))


Clauses = Annotated[tuple[Clause, ...], Meta(max_length=MAX_CONDITIONS)]


class ExpressionBody(Message, frozen=True):
    """Clauses in the place of one condition."""

    extra_schema: ClassVar = {"minProperties": 1}

    must: Annotated[Clauses | None, Meta(description="All of these hold", examples=[[_EXAMPLE]])] = None
    should: Annotated[Clauses | None, Meta(description="At least one of these holds, if there are any")] = None
    must_not: Annotated[Clauses | None, Meta(description="No clause of these holds")] = None

    def as_expression(self) -> "Expression | None":
        """Return the expression that it describes; None without clauses."""
        return Expression.of(self.must or (), self.should or (), self.must_not or ()) or None


@dataclass(frozen=True)
class Expression(Clause):
    """All of `must` hold, at least one of `should` if there are any, no `must_not`.

    Without clauses it matches every item, and is false.
    """

    must: tuple[Clause, ...] = field(compare=False)
    should: tuple[Clause, ...] = field(compare=False)
    must_not: tuple[Clause, ...] = field(compare=False)
    text: str
    num_tests: int = field(compare=False)
    """The cost in tests over every item."""

    @classmethod
    def of(
        cls, must: Sequence[Clause] = (), should: Sequence[Clause] = (), must_not: Sequence[Clause] = ()
    ) -> "Expression":
        """Make an expression and its canonical text, which ignores order and duplicates of clauses."""
        text = " ".join(
            f"{{{';'.join(sorted({clause.text for clause in part}))}}}" for part in (must, should, must_not)
        )
        num_tests = sum(clause.num_tests for part in (must, should, must_not) for clause in part)
        return cls(tuple(must), tuple(should), tuple(must_not), text, num_tests)

    def __bool__(self) -> bool:
        return bool(self.must or self.should or self.must_not)


def all_of(*expressions: Expression | None) -> Expression | None:
    """Return the conjunction of these expressions; None for none."""
    given = [expression for expression in expressions if expression is not None]
    return Expression.of(must=given) if len(given) > 1 else next(iter(given), None)


def clauses_in(clause: Clause, path: str, level: int = 1) -> Iterator[tuple[str, Clause, int]]:
    """Yield a clause, which is at this level, and all nested clauses, each with its path and its level, in order."""
    levels = [(path, clause, level)]
    while levels:
        at, inner, level = levels.pop()
        yield at, inner, level
        if isinstance(inner, Expression):
            nested = [
                (join(at, f"{branch}[{index}]"), child, level + 1)
                for branch in BRANCHES
                for index, child in enumerate(getattr(inner, branch))
            ]
            levels.extend(reversed(nested))


def conditions_of(clause: Clause, path: str) -> Iterator[tuple[str, Condition]]:
    """Yield every condition of a clause with its path, in order."""
    return ((at, inner) for at, inner, _ in clauses_in(clause, path) if isinstance(inner, Condition))


def check_size(clause: Clause, path: str, level: int = 2) -> None:
    """Reject a clause with too many levels, conditions or values; filters are at level 1. Raises InvalidField."""
    if isinstance(clause, Condition):  # its declaration limits its values
        return
    num_conditions = num_values = 0
    for at, inner, depth in clauses_in(clause, path, level):
        if isinstance(inner, Expression) and depth > MAX_DEPTH:
            raise InvalidField(at, "nested too deep", f"nest at most {MAX_DEPTH} levels")
        num_conditions += isinstance(inner, Condition)
        if isinstance(inner, Condition) and isinstance(inner.test, OneOf):
            num_values += len(inner.test.values)
        for number, limit, noun in ((num_conditions, MAX_CONDITIONS, "conditions"), (num_values, MAX_VALUES, "values")):
            if number > limit:
                raise InvalidField(path, f"more than {limit} {noun}", f"send at most {limit}")
