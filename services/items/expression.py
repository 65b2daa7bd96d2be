"""Expressions over items' columns, compiled to masks and kept until a column that they read changes. Numpy only.

A mask is computed from whole columns once: some milliseconds for a million items. After that, where few items changed since, it is computed
for these alone, in place. So a live catalogue costs nothing that grows with its size.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from services.contracts.filters import ITEM_ID, Clause, Condition, Exists, OneOf, Range, conditions_of
from services.contracts.plain import nearest
from services.errors import InvalidRequest
from services.items.columns import FlagColumn, ItemColumns, Kind, NumberColumn, TextColumn

MAX_CACHE_BYTES = 32 * 1_048_576
_WRITTEN: Mapping[Kind, str] = {"text": "texts", "number": "numbers", "flag": "true or false"}
_KIND_OF: Mapping[type, Kind] = {str: "text", float: "number", bool: "flag"}

Rows = np.ndarray | slice
"""Which items a mask is computed for: indices, or all."""
ALL: Rows = slice(None)
Column = TextColumn | NumberColumn | FlagColumn
Revisions = tuple[tuple[Column, int], ...]
"""The columns that an expression reads, with the revision of each."""


@dataclass(slots=True)
class _Compiled:
    mask: np.ndarray
    revisions: Revisions


@dataclass(slots=True)
class _TextIndex:
    """Which codes of a text column hold a text beside others. The column's values only grow, and so does this."""

    num_read: int = 0
    codes_of: dict[str, list[int]] = field(default_factory=dict)

    def codes(self, column: TextColumn, text: str) -> list[int]:
        """Return the codes of all values that hold this text."""
        for code in range(self.num_read, len(column.values)):
            if len(column.values[code]) > 1:
                for one in column.values[code]:
                    self.codes_of.setdefault(one, []).append(code)
        self.num_read = len(column.values)
        alone = column.code_of.get((text,))
        return [*(() if alone is None else (alone,)), *self.codes_of.get(text, ())]


class Expressions:
    """Compiles expressions over one set of columns. Not for several threads at once."""

    def __init__(
        self, columns: ItemColumns, index_of: Mapping[str, int], max_cache_bytes: int = MAX_CACHE_BYTES
    ) -> None:
        """Take the columns and the index of each item id; both may grow. Masks that are kept take `max_cache_bytes` at most, but for the newest."""
        self.columns = columns
        self._index_of = index_of
        self._max_cache_bytes = max_cache_bytes
        self._kept: OrderedDict[str, _Compiled] = OrderedDict()
        self._num_bytes = 0
        self._text_indices: dict[str, _TextIndex] = {}

    def check(self, clause: Clause, path: str) -> None:
        """Refuse attributes that no item has, and values of a kind that an attribute never has. Raises InvalidRequest naming the path."""
        for where, condition in conditions_of(clause, path):
            self._check(condition, where)

    def mask(self, clause: Clause) -> np.ndarray:
        """Return the items for which a clause holds, (num_items,) bool; an attribute that no item has holds for none. Read it only, and at once."""
        found = self._kept.get(clause.text)
        if found is None or len(found.mask) != self.columns.num_items:
            found = self._keep(clause.text, _Compiled(self._compute(clause, ALL), self._revisions(clause)))
        else:
            self._kept.move_to_end(clause.text)
            if (changed := _changed_since(found.revisions)) is None or self._has_new_columns(clause, found):
                found = self._keep(clause.text, _Compiled(self._compute(clause, ALL), self._revisions(clause)))
            elif len(changed):
                found.mask[changed] = self._compute(clause, changed)
                found.revisions = self._revisions(clause)
        return found.mask

    def _keep(self, text: str, compiled: _Compiled) -> _Compiled:
        if (before := self._kept.pop(text, None)) is not None:
            self._num_bytes -= before.mask.nbytes
        self._kept[text] = compiled
        self._num_bytes += compiled.mask.nbytes
        while self._num_bytes > self._max_cache_bytes and len(self._kept) > 1:
            self._num_bytes -= self._kept.popitem(last=False)[1].mask.nbytes
        return compiled

    def _columns_of(self, name: str) -> Iterable[Column]:
        columns = self.columns
        return (one[name] for one in (columns.texts, columns.numbers, columns.flags) if name in one)

    def _revisions(self, clause: Clause) -> Revisions:
        return tuple((column, column.revision) for column in self._read_by(clause))

    def _read_by(self, clause: Clause) -> list[Column]:
        keys = dict.fromkeys(condition.key for _, condition in conditions_of(clause, ""))
        return [column for key in keys for column in self._columns_of(key)]

    def _has_new_columns(self, clause: Clause, compiled: _Compiled) -> bool:
        """Whether a column was added or replaced since, which no revision tells."""
        read = self._read_by(clause)
        return len(read) != len(compiled.revisions) or any(
            one is not before for one, (before, _) in zip(read, compiled.revisions, strict=True)
        )

    def _compute(self, clause: Clause, rows: Rows) -> np.ndarray:
        if isinstance(clause, Condition):
            return self._compute_condition(clause, rows)
        mask = np.ones(self._num_rows(rows), dtype=bool)
        for one in clause.must:
            mask &= self._compute(one, rows)
        if clause.should:
            mask &= np.logical_or.reduce([self._compute(one, rows) for one in clause.should])
        for one in clause.must_not:
            mask &= ~self._compute(one, rows)
        return mask

    def _num_rows(self, rows: Rows) -> int:
        return self.columns.num_items if isinstance(rows, slice) else len(rows)

    def _compute_condition(self, condition: Condition, rows: Rows) -> np.ndarray:
        if condition.key == ITEM_ID:
            return self._compute_ids(condition, rows)
        columns, key, test = self.columns, condition.key, condition.test
        texts, numbers, flags = columns.texts.get(key), columns.numbers.get(key), columns.flags.get(key)
        mask = np.zeros(self._num_rows(rows), dtype=bool)
        match test:
            case OneOf(values):
                if texts is not None and (named := [one for one in values if isinstance(one, str)]):
                    mask |= self._holds_text(key, texts, named, rows)
                if numbers is not None and (wanted := [one for one in values if isinstance(one, float)]):
                    mask |= _equals_any(numbers.numbers[rows], wanted)
                if flags is not None and (states := [one for one in values if isinstance(one, bool)]):
                    mask |= _equals_any(flags.flags[rows], [int(one) for one in states])
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

    def _compute_ids(self, condition: Condition, rows: Rows) -> np.ndarray:
        mask = np.zeros(self.columns.num_items, dtype=bool)
        match condition.test:
            case OneOf(values):
                mask[[self._index_of[one] for one in values if isinstance(one, str) and one in self._index_of]] = True
            case Exists(wanted):
                mask[:] = wanted
            case Range():
                pass
        computed: np.ndarray = mask[rows]
        return computed

    def _holds_text(self, key: str, column: TextColumn, texts: list[str], rows: Rows) -> np.ndarray:
        index = self._text_indices.setdefault(key, _TextIndex())
        codes = [code for text in texts for code in index.codes(column, text)]
        if len(codes) <= 2:
            return _equals_any(column.codes[rows], codes)
        is_wanted = np.zeros(len(column.values), dtype=bool)
        is_wanted[codes] = True
        return is_wanted.take(column.codes[rows])

    def check_attribute(self, name: str, path: str) -> tuple[Kind, ...]:
        """Return the kinds of value that an attribute has. Raises InvalidRequest with the nearest names where no item has it."""
        kinds: tuple[Kind, ...] = ("text",) if name == ITEM_ID else self.columns.kinds(name)
        if not kinds:
            columns = self.columns
            known = {ITEM_ID, *columns.texts, *columns.numbers, *columns.flags}
            raise InvalidRequest(path, f"unknown attribute {name!r}", nearest(name, known))
        return kinds

    def _check(self, condition: Condition, path: str) -> None:
        kinds = self.check_attribute(condition.key, f"{path}.key")
        held = " or ".join(_WRITTEN[kind] for kind in kinds)
        match condition.test:
            case OneOf(values):
                name = "in" if len(values) > 1 else "eq"
                for place, value in enumerate(values):
                    if _KIND_OF[type(value)] not in kinds:
                        where = f"{path}.{name}[{place}]" if len(values) > 1 else f"{path}.{name}"
                        raise InvalidRequest(where, f"{condition.key} holds {held}", f"send {held}")
            case Range() if "number" not in kinds:
                raise InvalidRequest(f"{path}.range", f"{condition.key} holds {held}", "use eq, in or exists")


def _changed_since(revisions: Revisions) -> np.ndarray | None:
    """Return the items that changed in these columns since these revisions; None where that is not known any more."""
    changed: set[int] = set()
    for column, revision in revisions:
        num_changes = column.revision - revision
        if num_changes > len(column.changes):
            return None
        if num_changes:
            changed.update(list(column.changes)[-num_changes:])
    return np.fromiter(changed, dtype=np.int64, count=len(changed))


def _equals_any(numbers: np.ndarray, values: list[float] | list[int]) -> np.ndarray:
    if len(values) > 2:
        found: np.ndarray = np.isin(numbers, values)
        return found
    mask = np.zeros(len(numbers), dtype=bool)
    for value in values:
        mask |= numbers == value
    return mask


def _within(numbers: np.ndarray, test: Range) -> np.ndarray:
    mask = np.ones(len(numbers), dtype=bool)
    for bound, compare in (
        (test.gte, np.greater_equal),
        (test.gt, np.greater),
        (test.lte, np.less_equal),
        (test.lt, np.less),
    ):
        if bound is not None:
            mask &= compare(numbers, bound)
    return mask
