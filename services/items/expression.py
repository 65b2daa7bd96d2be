"""Expressions over items' columns, compiled to masks and kept until a column that they read changes. Numpy only.

A mask is computed from whole columns once: some milliseconds for a million items. After that, where few items changed since, it is computed
for these alone, in place. So a live catalogue costs nothing that grows with its size.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from services.contracts.filters import ITEM_ID, Clause, Condition, Exists, OneOf, Range, conditions_of
from services.contracts.plain import nearest
from services.errors import InvalidRequest
from services.items.columns import ALL, FlagColumn, ItemColumns, Kind, NumberColumn, Rows, TextColumn
from services.items.layout import ItemLayout

MAX_CACHE_BYTES = 32 * 1_048_576
_FEW_VALUES = 32
"""So many are compared in turn sooner than each cell is looked for among them."""
_WRITTEN: Mapping[Kind, str] = {"text": "texts", "number": "numbers", "flag": "true or false"}
_KIND_OF: Mapping[type, Kind] = {str: "text", float: "number", bool: "flag"}

Column = TextColumn | NumberColumn | FlagColumn
Tables = tuple[Mapping[str, TextColumn], Mapping[str, NumberColumn], Mapping[str, FlagColumn]]
Revisions = tuple[tuple[Column, int], ...]
"""The columns that an expression reads, with the revision of each."""


@dataclass(slots=True)
class _Compiled:
    mask: np.ndarray
    revisions: Revisions
    num_named: int
    tables: Tables

    def is_current(self, tables: Tables, num_named: int) -> bool:
        """Whether nothing that the mask was made of has changed."""
        if self.num_named != num_named or any(one is not other for one, other in zip(self.tables, tables, strict=True)):
            return False
        return all(column.revision == made for column, made in self.revisions)


class Expressions:
    """Compiles expressions over the columns of one layout, which another thread may change. Masks are for one thread at a time."""

    def __init__(self, items: ItemLayout, max_cache_bytes: int = MAX_CACHE_BYTES) -> None:
        """Take the layout. Masks are kept in `max_cache_bytes`; the newest always is."""
        self._items = items
        self._max_cache_bytes = max_cache_bytes
        self._kept: OrderedDict[str, _Compiled] = OrderedDict()
        self._num_bytes = 0

    @property
    def columns(self) -> ItemColumns:
        """The columns as they are now; those for more items are others."""
        return self._items.columns

    def check(self, clause: Clause, path: str) -> None:
        """Refuse attributes that no item has, and values of a kind that an attribute never has. Raises InvalidRequest naming the path."""
        for where, condition in conditions_of(clause, path):
            self._check(condition, where)

    def check_attribute(self, name: str, path: str) -> tuple[Kind, ...]:
        """Return the kinds of value that an attribute has. Raises InvalidRequest with the nearest names where no item has it."""
        columns = self.columns
        kinds: tuple[Kind, ...] = ("text",) if name == ITEM_ID else columns.kinds(name)
        if not kinds:
            known = {ITEM_ID, *columns.texts, *columns.numbers, *columns.flags}
            raise InvalidRequest(path, f"unknown attribute {name!r}", nearest(name, known))
        return kinds

    def mask(self, clause: Clause) -> np.ndarray:
        """Return the items for which a clause holds, (num_items,) bool; an attribute that no item has holds for none.

        The mask is kept and mended: read it only, and before the next call.
        """
        num_named = self._items.num_named
        columns, found = self.columns, self._kept.get(clause.text)
        tables = columns.texts, columns.numbers, columns.flags
        if found is not None and found.is_current(tables, num_named):
            self._kept.move_to_end(clause.text)
            return found.mask
        revisions = tuple((column, column.revision) for column in _columns_read(tables, clause))  # before the cells
        changed = None if found is None else _changed_between(found, revisions, columns.num_items, num_named)
        if found is None or changed is None:
            found = _Compiled(self._compute(columns, clause, ALL), revisions, num_named, tables)
            self._keep(clause.text, found)
            return found.mask
        self._kept.move_to_end(clause.text)
        if len(changed):
            found.mask[changed] = self._compute(columns, clause, changed)
        found.revisions, found.num_named, found.tables = revisions, num_named, tables
        return found.mask

    def _keep(self, text: str, compiled: _Compiled) -> None:
        if (before := self._kept.pop(text, None)) is not None:
            self._num_bytes -= before.mask.nbytes
        self._kept[text] = compiled
        self._num_bytes += compiled.mask.nbytes
        while self._num_bytes > self._max_cache_bytes and len(self._kept) > 1:
            self._num_bytes -= self._kept.popitem(last=False)[1].mask.nbytes

    def _compute(self, columns: ItemColumns, clause: Clause, rows: Rows) -> np.ndarray:
        if isinstance(clause, Condition):
            return self._compute_condition(columns, clause, rows)
        mask = np.ones(_num_rows(columns, rows), dtype=bool)
        for one in clause.must:
            mask &= self._compute(columns, one, rows)
        if clause.should:
            holds = np.zeros(len(mask), dtype=bool)
            for one in clause.should:
                holds |= self._compute(columns, one, rows)
            mask &= holds
        for one in clause.must_not:
            mask &= ~self._compute(columns, one, rows)
        return mask

    def _compute_condition(self, columns: ItemColumns, condition: Condition, rows: Rows) -> np.ndarray:
        if condition.key == ITEM_ID:
            return self._compute_ids(columns, condition, rows)
        key, test = condition.key, condition.test
        texts, numbers, flags = columns.texts.get(key), columns.numbers.get(key), columns.flags.get(key)
        mask = np.zeros(_num_rows(columns, rows), dtype=bool)
        match test:
            case OneOf(values):
                if texts is not None and (named := [one for one in values if isinstance(one, str)]):
                    mask |= texts.holding(named, rows)
                if numbers is not None and (wanted := [one for one in values if isinstance(one, float)]):
                    mask |= _equals_any(numbers.numbers[rows], wanted)
                if flags is not None and (states := [float(one) for one in values if isinstance(one, bool)]):
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
                found = [self._items.index(one) for one in values if isinstance(one, str)]
                mask[[index for index in found if index is not None and index < len(mask)]] = True
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
                for place, value in enumerate(values):
                    if _KIND_OF[type(value)] not in kinds:
                        where = f"{path}.eq" if len(values) == 1 else f"{path}.in[{place}]"
                        raise InvalidRequest(where, f"{condition.key} holds {held}", f"send {held}")
            case Range() if "number" not in kinds:
                raise InvalidRequest(f"{path}.range", f"{condition.key} holds {held}", "use eq, in or exists")


def _columns_read(tables: Tables, clause: Clause) -> list[Column]:
    keys = dict.fromkeys(condition.key for _, condition in conditions_of(clause, ""))
    return [table[key] for key in keys for table in tables if key in table]


def _changed_between(found: _Compiled, now: Revisions, num_items: int, num_named: int) -> np.ndarray | None:
    """Return the items that changed or came since a mask was made, (n,) int; None where that is not known, or the columns are others."""
    if len(found.mask) != num_items or len(found.revisions) != len(now):
        return None
    changed = set(range(found.num_named, num_named))
    for (column, made), (same, revision) in zip(found.revisions, now, strict=True):
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
    """Return which cells equal any of these values. `np.isin` sorts the cells, which takes longer the more there are."""
    wanted = np.unique(values)
    if len(wanted) > _FEW_VALUES:
        places = np.minimum(np.searchsorted(wanted, cells), len(wanted) - 1)
        found: np.ndarray = wanted[places] == cells
        return found
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
