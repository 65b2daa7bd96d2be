"""A compiled expression equals its evaluation item by item, also after changes."""

import math
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.catalogue import Catalogue
from services.contracts.filters import Clause, Condition, Exists, Expression, OneOf, Range
from services.contracts.items import ItemState
from services.contracts.message import convert
from services.contracts.recommend import Filters
from services.errors import InvalidRequest
from services.items.expression import FEW_TESTS, MAX_CELLS, MAX_TESTS, Budget, Expressions
from services.items.layout import ItemLayout

NUM_KNOWN = 6
NOW_MS = 1_800_000_000_000
TEXTS, NUMBERS = ("red", "green", "a b"), (0.0, 1.0, 2.5)


def catalogue() -> Catalogue:
    """Return six items in two categories."""
    names = tuple(f"i{index}" for index in range(NUM_KNOWN))
    categories = tuple((("red",), ("red", "green"), ())[index % 3] for index in range(NUM_KNOWN))
    codes = np.arange(NUM_KNOWN, dtype=np.int32)[:, None]
    return Catalogue(names, names, categories, codes, (NUM_KNOWN,), np.arange(NUM_KNOWN, dtype=np.float64))


VALUES = st.sampled_from([*TEXTS, *NUMBERS, True, False])
KEYS = st.sampled_from(["colour", "size", "new", "any", "categories", "popularity", "item_id", "absent"])
RANGES = st.builds(
    Range,
    gte=st.none() | st.sampled_from(NUMBERS),
    lt=st.none() | st.sampled_from(NUMBERS),
).filter(lambda condition: condition != Range())
TESTS = st.one_of(
    st.lists(VALUES | st.sampled_from(["i0", "i1", "n0"]), min_size=1, max_size=5).map(lambda held: OneOf(tuple(held))),
    RANGES,
    st.booleans().map(Exists),
)
CONDITIONS = st.builds(Condition.of, KEYS, TESTS)
CLAUSES = st.recursive(
    CONDITIONS,
    lambda inner: st.builds(Expression.of, *[st.lists(inner, max_size=3)] * 3),
    max_leaves=6,
)
ATTRIBUTES = st.fixed_dictionaries(
    {},
    optional={
        "colour": st.sampled_from(TEXTS) | st.permutations(TEXTS).map(lambda held: tuple(held[:2])),
        "size": st.sampled_from(NUMBERS),
        "new": st.booleans(),
        "any": VALUES,
    },
)
CHANGES = st.lists(
    st.tuples(st.sampled_from([*(f"i{index}" for index in range(NUM_KNOWN)), "n0", "n1"]), ATTRIBUTES), max_size=6
)


def put(items: ItemLayout, item_id: str, attributes: dict[str, Any]) -> None:
    items.put(item_id, ItemState(item_id=item_id, attributes=attributes), NOW_MS)


def slow_mask(items: ItemLayout, clause: Clause) -> list[bool]:
    return [slow_holds(clause, held_by(items, index)) for index in range(items.num_named)]


def held_by(items: ItemLayout, index: int) -> dict[str, tuple[Any, ...]]:
    """Return an item's values by attribute."""
    item_id = items.item_id(index)
    state = items.shown_state(item_id)
    assert state is not None
    held = {name: value if isinstance(value, tuple) else (value,) for name, value in state.attributes.items()}
    popularity = float(index) if index < NUM_KNOWN else 0.0
    return {**held, "categories": state.categories or (), "item_id": (item_id,), "popularity": (popularity,)}


def slow_holds(clause: Clause, held: dict[str, tuple[Any, ...]]) -> bool:
    """Return whether a clause holds for these values."""
    if isinstance(clause, Expression):
        return (
            all(slow_holds(condition, held) for condition in clause.must)
            and (not clause.should or any(slow_holds(condition, held) for condition in clause.should))
            and not any(slow_holds(condition, held) for condition in clause.must_not)
        )
    values = held.get(clause.key, ())
    match clause.test:
        case Exists(wanted):
            return bool(values) == wanted
        case OneOf(wanted_values):
            return any(type(value) is type(other) and value == other for value in values for other in wanted_values)
        case Range(gte, _, _, lt):
            numbers = [value for value in values if type(value) is float]
            return any((gte is None or number >= gte) and (lt is None or number < lt) for number in numbers)


@given(CHANGES, st.lists(st.tuples(CHANGES, CLAUSES), min_size=1, max_size=4))
def test_a_mask_is_the_evaluation_item_by_item(
    before: list[tuple[str, dict[str, Any]]], rounds: list[tuple[list[tuple[str, dict[str, Any]]], Clause]]
) -> None:
    """Every mask is correct after each round of changes, including new items and new attributes."""
    items = ItemLayout(catalogue())
    expressions = Expressions(items)
    for item_id, attributes in before:
        put(items, item_id, attributes)
    for changes, _ in rounds:
        for item_id, attributes in changes:
            put(items, item_id, attributes)
        for _, clause in rounds:
            assert expressions.mask(clause)[: items.num_named].tolist() == slow_mask(items, clause)


def test_items_are_named_by_id_also_items_that_nobody_has() -> None:
    """A condition on item_id matches the known ids among its values."""
    mask = Expressions(ItemLayout(catalogue())).mask(Condition.of("item_id", OneOf(("i1", "unknown", "i4"))))

    assert np.flatnonzero(mask).tolist() == [1, 4]


def test_few_changes_are_computed_again_and_many_make_the_whole_mask_new() -> None:
    """After few changes only the changed items are recomputed; a returned mask never changes."""
    items = ItemLayout(catalogue())
    expressions, cheap = Expressions(items), Condition.of("price", Range(lt=5.0))
    put(items, "i0", {"price": 9.0})
    first = expressions.mask(cheap)
    assert not first.any()

    items.columns.number("price").numbers[1] = 1.0  # not noted as a change
    put(items, "i0", {"price": 1.0})
    mended = expressions.mask(cheap)
    assert (mended[:2].tolist(), bool(first[0])) == ([True, False], False)
    assert expressions.mask(cheap) is mended

    for number in range(2_000):
        put(items, "i1", {"price": float(number % 7)})
    again = expressions.mask(cheap)
    assert again[:2].tolist() == [True, float(1_999 % 7) < 5.0]


def test_columns_for_more_items_are_read_anew() -> None:
    """A mask compiled for fewer items is extended."""
    items = ItemLayout(catalogue())
    expressions, has_price = Expressions(items), Condition.of("price", Exists(True))
    put(items, "i0", {"price": 1.0})
    assert expressions.mask(has_price).sum() == 1

    for number in range(500):
        put(items, f"n{number}", {"price": 1.0})

    assert expressions.mask(has_price).sum() == 501


def test_a_cell_that_is_written_without_a_trace_makes_the_mask_new() -> None:
    """A snapshot writes a whole column and increments its revision once, which recomputes the mask."""
    items = ItemLayout(catalogue())
    expressions, has_price = Expressions(items), Condition.of("price", Exists(True))
    put(items, "i0", {"price": 1.0})
    expressions.mask(has_price)

    items.columns.numbers["price"].numbers[:3] = 2.0
    items.columns.numbers["price"].revision += 1

    assert expressions.mask(has_price).sum() == 3


def test_kept_masks_are_bounded() -> None:
    """The least recently used mask is evicted, but a single mask of any size is kept."""
    items = ItemLayout(catalogue())
    put(items, "i0", {"price": 1.0})
    expressions = Expressions(items, max_cache_bytes=2 * kept_bytes(items))
    clauses = [Condition.of("price", Range(lt=float(limit))) for limit in range(3)]

    first, second = expressions.mask(clauses[0]), expressions.mask(clauses[1])
    assert expressions.mask(clauses[0]) is first
    expressions.mask(clauses[2])

    assert expressions.mask(clauses[0]) is first
    assert expressions.mask(clauses[1]) is not second


def kept_bytes(items: ItemLayout) -> int:
    """Return the size of one condition's mask."""
    expressions = Expressions(items)
    expressions.mask(Condition.of("price", Exists(True)))
    return expressions.num_bytes


def test_what_is_kept_takes_the_memory_that_is_counted() -> None:
    """The bound includes keys and column records: long expressions over few items stay within it."""
    items = ItemLayout(catalogue())
    put(items, "i0", {"colour": "red"})
    expressions, most = Expressions(items, max_cache_bytes=500_000), 1_000_000
    tracemalloc.start()
    for number in range(400):
        values = tuple(f"{number} {index}".ljust(250, "x") for index in range(200))
        expressions.mask(Condition.of("colour", OneOf(values)))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert expressions.num_bytes <= 500_000
    assert held < most


def test_threads_compile_at_once_while_items_change() -> None:
    """Each mask is correct for some moment during the call, and finally for the last change."""
    items = ItemLayout(catalogue())
    put(items, "i0", {"price": 0.0})
    expressions = Expressions(items, 3 * kept_bytes(items), lock=threading.Lock())
    clauses = [Condition.of("price", Range(gte=float(limit))) for limit in range(6)]

    def compile_often(turn: int) -> None:
        """Compile every clause repeatedly."""
        for number in range(200):
            expressions.mask(clauses[(turn + number) % len(clauses)])

    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(compile_often, turn) for turn in range(4)]
        for price in range(2_000):
            put(items, "i0", {"price": float(price % 6)})
        for thread in running:
            thread.result()

    assert [bool(expressions.mask(clause)[0]) for clause in clauses] == [
        float(1_999 % 6) >= limit for limit in range(6)
    ]


def test_long_work_is_not_done_at_once() -> None:
    """Few tests, and many with cached masks, are compiled at once; other work is not."""
    items = ItemLayout(catalogue())
    put(items, "i0", {"price": 1.0})
    expressions = Expressions(items)
    few = [Condition.of("price", Range(lt=float(limit))) for limit in range(FEW_TESTS)]
    many = [*few, Condition.of("price", Exists(True))]

    assert expressions.compiled_soon(few) is not None
    assert expressions.compiled_soon(many) is None
    assert expressions.compiled(many).mask(many[-1])[0]
    assert expressions.compiled_soon(many) is not None
    put(items, "i1", {"price": 1.0})
    assert expressions.compiled_soon(many) is None


def test_tests_are_counted_by_clause_and_refused_by_path() -> None:
    """Equal clauses count once, a condition counts per number, and the error names path and limit."""
    expressions, budget = Expressions(ItemLayout(catalogue())), Budget()
    numbers = Condition.of("price", OneOf(tuple(float(number) for number in range(30))))
    texts = Condition.of("colour", OneOf(("red", "green")))
    expression = Expression.of(must=[numbers, texts], should=[Condition.of("price", Range(lt=1.0))])

    assert (numbers.num_tests, texts.num_tests, expression.num_tests) == (30, 1, 32)
    for _ in range(MAX_TESTS):
        budget.spend(expression, "filters", expressions)
    for limit in range(MAX_TESTS - expression.num_tests):
        budget.spend(Condition.of("price", Range(lt=float(limit))), "filters", expressions)
    with pytest.raises(InvalidRequest) as refused:
        budget.spend(texts, "rules.blocks[3]", expressions)
    assert refused.value.field == "rules.blocks[3]"
    assert str(MAX_TESTS) in refused.value.fix


def test_tests_of_many_items_have_a_smaller_budget() -> None:
    """Tests times items are counted over all clauses of a call, also over several bundles."""
    large: Any = SimpleNamespace(columns=SimpleNamespace(num_items=MAX_CELLS // 4 - 1))
    budget = Budget()
    for number in range(4):
        budget.spend(Condition.of("price", Range(lt=float(number))), "filters", large)

    with pytest.raises(InvalidRequest) as refused:
        budget.spend(Condition.of("price", Range(lt=9.0)), "filters", large)
    assert refused.value.fix == "send at most 4 in one call"


def test_order_and_doubles_do_not_make_another_expression() -> None:
    """Equal clauses have one text regardless of order and duplicates; flags, numbers and texts stay distinct."""
    red, blue = Condition.of("colour", OneOf(("red", "blue"))), Condition.of("colour", OneOf(("blue", "red", "red")))
    new = Condition.of("new", OneOf((True,)))

    assert red == blue
    assert Expression.of(must=[red, new]) == Expression.of(must=[new, blue, new])
    assert len({Condition.of("new", OneOf((value,))).text for value in (True, 1.0, "1.0", "True", "true")}) == 5
    assert Expression.of(must=[new]) != Expression.of(should=[new])


@pytest.mark.parametrize(
    ("plain", "error"),
    [
        ({"must": [{"key": "pirce", "eq": 1}]}, r"f.must\[0\].key: unknown attribute 'pirce'; the nearest: 'price'"),
        (
            {"must_not": [{"should": [{"key": "price", "eq": "x"}]}]},
            r"f.must_not\[0\].should\[0\].eq: price holds numbers",
        ),
        ({"must": [{"key": "price", "in": [1, True]}]}, r"f.must\[0\].in\[1\]: price holds numbers"),
        ({"should": [{"key": "colour", "range": {"lt": 1}}]}, r"f.should\[0\].range: colour holds texts"),
    ],
)
def test_what_no_item_has_is_refused_by_path(plain: dict[str, Any], error: str) -> None:
    """The error names the nearest attribute, or the kind of values that the attribute has."""
    items = ItemLayout(catalogue())
    put(items, "i0", {"price": 1.0, "colour": "red"})
    expression = convert(Filters, plain).expression
    assert expression is not None

    with pytest.raises(InvalidRequest, match=error):
        Expressions(items).check(expression, "f")
    assert not math.isnan(Expressions(items).mask(expression).sum())
