"""Expressions over the attributes of items, in the shape of Qdrant's filters: `must`, `should` and `must_not`, nested.

    {"must": [{"key": "price", "range": {"lt": 20}}, {"should": [{"key": "brand", "in": ["Acme", "Umbra"]},
                                                                 {"key": "new", "eq": true}]}],
     "must_not": [{"key": "age_limit", "exists": true}]}

An item matches if all of `must` hold, at least one of `should` if there are any, and none of `must_not`. A text
attribute may have several values, any of which may match. A missing attribute equals nothing and is in no range. The
key `item_id` is the item's own id.

Every expression has a canonical text, used for comparison and caching. Does not know which attributes exist.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.contracts.plain import read_flag, read_list, read_number, read_object, read_text, required
from services.errors import InvalidRequest

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
BRANCHES = ("must", "should", "must_not")
BOUNDS = ("gte", "gt", "lte", "lt")

Value = str | float | bool


@dataclass(frozen=True, slots=True)
class OneOf:
    """Whether the attribute equals any of these values; `eq` is one value."""

    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Range:
    """Whether the attribute is a number within these bounds; None is unbounded."""

    gte: float | None = None
    gt: float | None = None
    lte: float | None = None
    lt: float | None = None


@dataclass(frozen=True, slots=True)
class Exists:
    """Whether the item has the attribute (`wanted`), or lacks it."""

    wanted: bool


Test = OneOf | Range | Exists


@dataclass(frozen=True, slots=True)
class Condition:
    """One test of one attribute."""

    key: str = field(compare=False)
    test: Test = field(compare=False)
    text: str

    @property
    def num_tests(self) -> int:
        """The cost in tests over every item: one, or one per number, and more for many texts."""
        if not isinstance(self.test, OneOf):
            return 1
        num_texts = sum(isinstance(one, str) for one in self.test.values)
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


@dataclass(frozen=True, slots=True)
class Expression:
    """All of `must` hold, at least one of `should` if there are any, none of `must_not`.

    Without clauses it matches every item.
    """

    must: tuple["Clause", ...] = field(compare=False)
    should: tuple["Clause", ...] = field(compare=False)
    must_not: tuple["Clause", ...] = field(compare=False)
    text: str
    num_tests: int = field(compare=False)
    """The cost in tests over every item."""

    @classmethod
    def of(
        cls, must: Sequence["Clause"] = (), should: Sequence["Clause"] = (), must_not: Sequence["Clause"] = ()
    ) -> "Expression":
        """Make an expression and its canonical text, which ignores order and duplicates of clauses."""
        text = " ".join(f"{{{';'.join(sorted({one.text for one in part}))}}}" for part in (must, should, must_not))
        num_tests = sum(one.num_tests for part in (must, should, must_not) for one in part)
        return cls(tuple(must), tuple(should), tuple(must_not), text, num_tests)


Clause = Condition | Expression


def all_of(*expressions: Expression | None) -> Expression | None:
    """Return the conjunction of these expressions; None for none."""
    given = [one for one in expressions if one is not None]
    return Expression.of(must=given) if len(given) > 1 else next(iter(given), None)


def conditions_of(clause: Clause, path: str) -> Iterator[tuple[str, Condition]]:
    """Yield every condition of a clause with its path, in order."""
    if isinstance(clause, Condition):
        yield path, clause
        return
    for branch in BRANCHES:
        for place, inner in enumerate(getattr(clause, branch)):
            yield from conditions_of(inner, f"{path}.{branch}[{place}]")


def parse_expression(plain: Mapping[str, Any], path: str) -> Expression | None:
    """Read the branches of an object without other keys; None if it has no branches.

    Raises InvalidRequest naming the path.
    """
    expression = _Reader(path).expression(plain, path, 1)
    return expression if expression.must or expression.should or expression.must_not else None


def parse_clause(plain: Any, path: str) -> Clause:
    """Read one condition, or an expression in its place. Raises InvalidRequest naming the path."""
    return _Reader(path).clause(plain, path, 1)


class _Reader:
    """Reads one expression and counts its conditions and values."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._num_conditions = 0
        self._num_values = 0

    def expression(self, plain: Mapping[str, Any], path: str, depth: int) -> Expression:
        if depth > MAX_DEPTH:
            raise InvalidRequest(path, "nested too deep", f"nest at most {MAX_DEPTH} levels")
        must, should, must_not = (self._branch(plain.get(name), f"{path}.{name}", depth) for name in BRANCHES)
        return Expression.of(must, should, must_not)

    def clause(self, plain: Any, path: str, depth: int) -> Clause:
        fields = read_object(path, plain, ("key", *TESTS, *BRANCHES))
        if not fields.keys() & set(BRANCHES):
            return self._condition(fields, path)
        if other := next((name for name in fields if name not in BRANCHES), None):
            raise InvalidRequest(f"{path}.{other}", "beside must, should or must_not", "make it a clause of its own")
        expression = self.expression(fields, path, depth + 1)
        if not (expression.must or expression.should or expression.must_not):
            raise InvalidRequest(path, "without any clause", "leave it out, or send at least one")
        return expression

    def _branch(self, plain: Any, path: str, depth: int) -> tuple[Clause, ...]:
        listed = () if plain is None else read_list(path, plain, MAX_CONDITIONS)
        return tuple(self.clause(one, f"{path}[{place}]", depth) for place, one in enumerate(listed))

    def _condition(self, fields: Mapping[str, Any], path: str) -> Condition:
        self._num_conditions += 1
        if self._num_conditions > MAX_CONDITIONS:
            raise InvalidRequest(self._root, f"more than {MAX_CONDITIONS} conditions", f"send at most {MAX_CONDITIONS}")
        key = read_text(f"{path}.key", required(path, fields, "key"))
        tests = [name for name in TESTS if name in fields]
        if len(tests) != 1:
            problem = "no test" if not tests else f"{' and '.join(tests)} at once"
            raise InvalidRequest(path, problem, f"send one of {', '.join(TESTS)}")
        return Condition.of(key, self._test(tests[0], fields[tests[0]], f"{path}.{tests[0]}"))

    def _test(self, name: str, plain: Any, path: str) -> Test:
        match name:
            case "eq":
                return OneOf((self._value(plain, path),))
            case "in":
                values = read_list(path, plain, MAX_VALUES)
                if not values:
                    raise InvalidRequest(path, "empty, so it holds for no item", "name at least one value")
                return OneOf(tuple(self._value(one, f"{path}[{place}]") for place, one in enumerate(values)))
            case "range":
                return _range(plain, path)
            case _:
                return Exists(read_flag(path, plain))

    def _value(self, plain: Any, path: str) -> Value:
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise InvalidRequest(self._root, f"more than {MAX_VALUES} values", f"send at most {MAX_VALUES}")
        if isinstance(plain, bool):
            return plain
        if isinstance(plain, str):
            return read_text(path, plain)
        if isinstance(plain, int | float):
            return read_number(path, plain)
        raise InvalidRequest(path, "neither text, number nor flag", 'send a value such as "red", 20 or true')


def _range(plain: Any, path: str) -> Range:
    fields = read_object(path, plain, BOUNDS)
    bounds = {name: read_number(f"{path}.{name}", value) for name, value in fields.items()}
    if not bounds:
        raise InvalidRequest(path, "without bounds", f"send one of {', '.join(BOUNDS)}, or two")
    for one, other in (("gte", "gt"), ("lte", "lt")):
        if one in bounds and other in bounds:
            raise InvalidRequest(f"{path}.{other}", f"beside {one}", "send one of the two")
    return Range(**bounds)
