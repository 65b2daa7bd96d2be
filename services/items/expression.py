"""Expressions over items' columns, compiled to masks that are cached until a column that they read changes. Numpy only.

A mask is computed from whole columns once: about a millisecond per test for a million items. After few changes it is
copied and recomputed only for the changed items. A computed mask never changes, so any thread may compile and read.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.contracts.filters import (
    ITEM_ID,
    MOST_COMPARED,
    Clause,
    Condition,
    Exists,
    Expression,
    OneOf,
    Range,
    conditions_of,
)
from services.contracts.nearest import nearest
from services.errors import InvalidRequest
from services.items.columns import ALL, FlagColumn, ItemColumns, Kind, NumberColumn, Rows, TextColumn
from services.items.layout import ItemLayout

MAX_CACHE_BYTES = 32 * 1_048_576
MAX_CELLS = 200_000_000
"""Maximum tests times items of one request or one batch: at most half a second of one core."""
MAX_TESTS = 2_000
"""Maximum number of tests of one request or one batch, however few items there are."""
FEW_TESTS, _FEW_CELLS = 32, 1_000_000
"""Below these limits, computing is faster than handing over to another thread."""
_MAX_CHECKED = 4_096
_ENTRY_BYTES, _COLUMN_BYTES = 600, 120
"""Sizes of a cached mask's key and record, and of its reference to a column."""
_FEW_VALUES = MOST_COMPARED
"""Up to this many values, comparing in turn is faster than searching for each cell."""
_WRITTEN: Mapping[Kind, str] = {"text": "texts", "number": "numbers", "flag": "true or false"}
_KIND_OF: Mapping[type, Kind] = {str: "text", float: "number", bool: "flag"}

Column = TextColumn | NumberColumn | FlagColumn
Tables = tuple[Mapping[str, TextColumn], Mapping[str, NumberColumn], Mapping[str, FlagColumn]]
Revisions = tuple[tuple[Column, int], ...]
"""The columns that an expression reads, with the revision of each."""


_NO_LOCK: AbstractContextManager[Any] = nullcontext()


@dataclass(frozen=True, slots=True)
class _Kept:
    """A mask with the columns that it was computed from.

    `generation` identifies the tables of columns: a name may have been given to another column.
    """

    mask: np.ndarray
    revisions: Revisions
    num_named: int
    generation: int

    def is_current(self, generation: int, num_named: int) -> bool:
        """Return whether the columns are unchanged since the mask was computed."""
        is_same = self.num_named == num_named and self.generation == generation
        return is_same and all(column.revision == made for column, made in self.revisions)

    @property
    def num_bytes(self) -> int:
        """The memory of the mask, including its key."""
        return self.mask.nbytes + _ENTRY_BYTES + _COLUMN_BYTES * len(self.revisions)


class Budget:
    """The budget of tests of one request or one batch of requests; equal expressions count once."""

    def __init__(self) -> None:
        self._num_tests = self._num_cells = 0
        self._seen: set[tuple[int, str]] = set()

    def spend(self, clause: Clause, path: str, expressions: "Expressions") -> None:
        """Count a clause over the items of one bundle.

        Raises InvalidRequest naming the path if it exceeds the remaining budget.
        """
        key = id(expressions), clause.text
        if key in self._seen:
            return
        self._seen.add(key)
        num_items = expressions.columns.num_items
        most = min(MAX_TESTS - self._num_tests, (MAX_CELLS - self._num_cells) // max(1, num_items))
        if clause.num_tests > most:
            problem = f"{clause.num_tests} tests of {num_items} items, with {self._num_tests} before them"
            raise InvalidRequest(
                path, problem, f"send at most {min(MAX_TESTS, MAX_CELLS // max(1, num_items))} in one call"
            )
        self._num_tests += clause.num_tests
        self._num_cells += clause.num_tests * num_items


class Expressions:
    """Compiles expressions over the columns of one layout, which another thread may change."""

    def __init__(
        self,
        items: ItemLayout,
        max_cache_bytes: int = MAX_CACHE_BYTES,
        lock: AbstractContextManager[Any] = _NO_LOCK,
    ) -> None:
        """Take the layout. Masks are cached in `max_cache_bytes`, including keys; the newest mask is always kept.

        With a `lock`, several threads may compile. It is held while a cached mask is looked up or replaced, never while
        a mask is computed.
        """
        self._items = items
        self._max_cache_bytes = max_cache_bytes
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        self.num_bytes = 0
        """The size of the cached masks, including keys."""
        self._checked: tuple[Tables, set[bytes]] = ({}, {}, {}), set()
        """The clauses that passed `check` with these tables."""
        self._tables: Tables | None = None
        self._generation = 0
        self._lock = lock

    @property
    def columns(self) -> ItemColumns:
        """The current columns; a larger catalogue has other columns."""
        return self._items.columns

    def check(self, clause: Clause, path: str) -> None:
        """Refuse unknown attributes, and values of a kind that an attribute never has.

        Raises InvalidRequest naming the path.
        """
        tables = _tables_of(self.columns)
        if not _is_same(self._checked[0], tables):
            self._checked = tables, set()
        checked = self._checked[1]
        if clause.digest in checked:
            return
        for where, condition in conditions_of(clause, path):
            self._check(condition, where)
        if len(checked) >= _MAX_CHECKED:
            checked.clear()
        checked.add(clause.digest)

    def check_attribute(self, name: str, path: str) -> tuple[Kind, ...]:
        """Return the kinds of value that an attribute has.

        Raises InvalidRequest with the nearest names for an unknown attribute.
        """
        columns = self.columns
        kinds: tuple[Kind, ...] = ("text",) if name == ITEM_ID else columns.kinds(name)
        if not kinds:
            known = {ITEM_ID, *columns.texts, *columns.numbers, *columns.flags}
            raise InvalidRequest(path, f"unknown attribute {name!r}", nearest(name, known))
        return kinds

    def mask(self, clause: Clause) -> np.ndarray:
        """Return the items that match a clause, (num_items,) bool; a condition on an unknown attribute matches no item.

        The mask is shared: do not write to it.
        """
        key, num_named, columns = clause.digest, self._items.num_named, self.columns
        tables = _tables_of(columns)
        kept, generation = self._look_up(key, tables)
        if kept is not None and kept.is_current(generation, num_named):
            return kept.mask
        revisions = tuple((column, column.revision) for column in _columns_read(tables, clause))  # before the cells
        changed = None if kept is None else _changed_between(kept, revisions, columns.num_items, num_named)
        if kept is None or changed is None:
            mask = self._compute(columns, clause, ALL)
        elif len(changed):
            mask = kept.mask.copy()
            mask[changed] = self._compute(columns, clause, changed)
        else:
            mask = kept.mask
        self._keep(key, _Kept(mask, revisions, num_named, generation))
        return mask

    def compiled(self, clauses: Sequence[Clause]) -> "Compiled":
        return Compiled(self, {clause.text: self.mask(clause) for clause in clauses})

    def compiled_soon(self, clauses: Sequence[Clause]) -> "Compiled | None":
        """Return the masks if they are cached or cheap to compute; None if computing them would block an event loop."""
        num_tests = sum(clause.num_tests for clause in clauses)
        if num_tests <= FEW_TESTS and num_tests * self.columns.num_items <= _FEW_CELLS:
            return self.compiled(clauses)
        masks: dict[str, np.ndarray] = {}
        columns, num_named = self.columns, self._items.num_named
        for clause in clauses:
            kept, generation = self._look_up(clause.digest, _tables_of(columns))
            if kept is None or not kept.is_current(generation, num_named):
                return None
            masks[clause.text] = kept.mask
        return Compiled(self, masks)

    def _look_up(self, key: bytes, tables: Tables) -> tuple[_Kept | None, int]:
        """Return the cached mask, if any, and the generation of these tables."""
        with self._lock:
            if self._tables is None or not _is_same(self._tables, tables):
                self._tables, self._generation = tables, self._generation + 1
            if (kept := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
            return kept, self._generation

    def _keep(self, key: bytes, compiled: _Kept) -> None:
        with self._lock:
            if (before := self._kept.pop(key, None)) is not None:
                self.num_bytes -= before.num_bytes
            self._kept[key] = compiled
            self.num_bytes += compiled.num_bytes
            while self.num_bytes > self._max_cache_bytes and len(self._kept) > 1:
                self.num_bytes -= self._kept.popitem(last=False)[1].num_bytes

    def _compute(self, columns: ItemColumns, clause: Clause, rows: Rows) -> np.ndarray:
        if isinstance(clause, Condition):
            return self._compute_condition(columns, clause, rows)
        assert isinstance(clause, Expression), "a clause is a condition or an expression"
        mask = np.ones(_num_rows(columns, rows), dtype=bool)
        for nested in clause.must:
            mask &= self._compute(columns, nested, rows)
        if clause.should:
            holds = np.zeros(len(mask), dtype=bool)
            for nested in clause.should:
                holds |= self._compute(columns, nested, rows)
            mask &= holds
        for nested in clause.must_not:
            mask &= ~self._compute(columns, nested, rows)
        return mask

    def _compute_condition(self, columns: ItemColumns, condition: Condition, rows: Rows) -> np.ndarray:
        if condition.key == ITEM_ID:
            return self._compute_ids(columns, condition, rows)
        key, test = condition.key, condition.test
        texts, numbers, flags = columns.texts.get(key), columns.numbers.get(key), columns.flags.get(key)
        mask = np.zeros(_num_rows(columns, rows), dtype=bool)
        match test:
            case OneOf(values):
                if texts is not None and (named := [value for value in values if isinstance(value, str)]):
                    mask |= texts.holding(named, rows)
                if numbers is not None and (wanted := [value for value in values if isinstance(value, float)]):
                    mask |= _equals_any(numbers.numbers[rows], wanted)
                if flags is not None and (states := [float(value) for value in values if isinstance(value, bool)]):
                    mask |= _equals_any(flags.flags[rows], states)
            case Range():
                if numbers is not None:
                    mask |= _within(numbers.numbers[rows], test)
            case Exists(wanted):
                if texts is not None:
                    mask |= texts.codes[rows] != 0
                if numbers is not None:
                    mask |= ~np.isnan(numbers.numbers[rows])
                if flags is not None:
                    mask |= flags.flags[rows] >= 0
                return mask if wanted else ~mask
        return mask

    def _compute_ids(self, columns: ItemColumns, condition: Condition, rows: Rows) -> np.ndarray:
        mask = np.zeros(columns.num_items, dtype=bool)
        match condition.test:
            case OneOf(values):
                indices = [self._items.index(value) for value in values if isinstance(value, str)]
                mask[[index for index in indices if index is not None and index < len(mask)]] = True
            case Exists(wanted):
                mask[:] = wanted
            case Range():
                pass
        computed: np.ndarray = mask[rows]
        return computed

    def _check(self, condition: Condition, path: str) -> None:
        kinds = self.check_attribute(condition.key, f"{path}.key")
        held = " or ".join(_WRITTEN[kind] for kind in kinds)
        match condition.test:
            case OneOf(values):
                for index, value in enumerate(values):
                    if _KIND_OF[type(value)] not in kinds:
                        where = f"{path}.eq" if len(values) == 1 else f"{path}.in[{index}]"
                        raise InvalidRequest(where, f"{condition.key} holds {held}", f"send {held}")
            case Range() if "number" not in kinds:
                raise InvalidRequest(f"{path}.range", f"{condition.key} holds {held}", "use eq, in or exists")


@dataclass(frozen=True, slots=True)
class Compiled:
    """The masks of one request's clauses, computed before ranking. Later changes apply to the next request."""

    expressions: Expressions
    masks: Mapping[str, np.ndarray]

    @property
    def columns(self) -> ItemColumns:
        return self.expressions.columns

    def mask(self, clause: Clause) -> np.ndarray:
        """Return the items that match a clause, (num_items,) bool, read only.

        Recomputed if items were added meanwhile.
        """
        mask = self.masks.get(clause.text)
        return self.expressions.mask(clause) if mask is None or len(mask) < self.columns.num_items else mask


def _tables_of(columns: ItemColumns) -> Tables:
    return columns.texts, columns.numbers, columns.flags


def _is_same(tables: Tables, other: Tables) -> bool:
    return tables[0] is other[0] and tables[1] is other[1] and tables[2] is other[2]


def _columns_read(tables: Tables, clause: Clause) -> list[Column]:
    keys = dict.fromkeys(condition.key for _, condition in conditions_of(clause, ""))
    return [table[key] for key in keys for table in tables if key in table]


def _changed_between(kept: _Kept, now: Revisions, num_items: int, num_named: int) -> np.ndarray | None:
    """Return the items changed or added since a mask was made, (n,) int; None if unknown or for other columns."""
    if len(kept.mask) != num_items or len(kept.revisions) != len(now):
        return None
    changed = set(range(kept.num_named, num_named))
    for (column, made), (same, revision) in zip(kept.revisions, now, strict=True):
        if column is not same:
            return None
        if made == revision:
            continue
        since = [index for moved_to, index in list(column.changes) if made < moved_to <= revision]
        if len(since) != revision - made:
            return None
        changed.update(since)
    return np.fromiter(changed, dtype=np.int64, count=len(changed))


def _num_rows(columns: ItemColumns, rows: Rows) -> int:
    return columns.num_items if isinstance(rows, slice) else len(rows)


def _equals_any(cells: np.ndarray, values: list[float]) -> np.ndarray:
    """Return which cells equal any of these values. `np.isin` would sort the cells, which takes longer."""
    wanted = np.unique(values)
    if len(wanted) > _FEW_VALUES:
        places = np.minimum(np.searchsorted(wanted, cells), len(wanted) - 1)
        is_equal: np.ndarray = wanted[places] == cells
        return is_equal
    mask = np.zeros(len(cells), dtype=bool)
    for value in wanted.astype(cells.dtype):
        mask |= cells == value
    return mask


def _within(numbers: np.ndarray, test: Range) -> np.ndarray:
    compared = (
        (test.gte, np.greater_equal),
        (test.gt, np.greater),
        (test.lte, np.less_equal),
        (test.lt, np.less),
    )
    mask = np.ones(len(numbers), dtype=bool)
    for bound, compare in compared:
        if bound is not None:
            mask &= compare(numbers, bound)
    return mask
