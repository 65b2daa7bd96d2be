"""The attributes of items in columns, one value per item, by item index. Numpy only.

An attribute holds texts, numbers or flags; a name may have values of all three kinds, in one column each. A change of
an item changes its cell in place and the column's revision, so results computed from a column stay valid until the
revision changes. More than `num_items` items need a longer copy, which is another object.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

Kind = Literal["text", "number", "flag"]
Rows = slice | np.ndarray
"""Which items: indices, or all."""
ALL: Rows = slice(None)

_NUM_CHANGES_KEPT = 1_024
_MIN_VALUES = 4_096
"""A smaller table is never searched for unused texts."""
_FEW_CODES = 3
"""Comparing up to this many codes in turn is faster than looking up all items' codes in a table."""


def _changes() -> deque[tuple[int, int]]:
    """Recent cell changes: results computed from a column are updated only where it changed."""
    return deque(maxlen=_NUM_CHANGES_KEPT)


@dataclass(slots=True)
class TextColumn:
    """Texts: item i has the texts `values[codes[i]]`.

    `codes` is (num_items,) int32; `values[0]` is empty, for items without texts. Items with the same texts share an
    entry of `values`. An entry never changes: `compacted` returns another column without unused entries.
    """

    codes: np.ndarray
    values: list[tuple[str, ...]] = field(default_factory=lambda: [()])
    code_of: dict[tuple[str, ...], int] = field(default_factory=lambda: {(): 0})
    revision: int = 0
    changes: deque[tuple[int, int]] = field(default_factory=_changes)
    num_set: int = 0
    """Items that have texts; see `count`."""
    max_values: int = _MIN_VALUES
    """With more values than this, the column should be replaced by `compacted`."""
    _codes_by_text: dict[str, list[int]] = field(default_factory=dict)
    _num_indexed: int = 0

    def codes_with(self, text: str) -> list[int]:
        """Return the codes of all values with this text.

        The first call reads all values; values with one text need no index.
        """
        for code in range(self._num_indexed, len(self.values)):
            if len(self.values[code]) > 1:
                for value in dict.fromkeys(self.values[code]):
                    self._codes_by_text.setdefault(value, []).append(code)
            self._num_indexed = code + 1
        alone = self.code_of.get((text,))
        return [*(() if alone is None else (alone,)), *self._codes_by_text.get(text, ())]

    def holding(self, texts: Iterable[str], rows: Rows = ALL) -> np.ndarray:
        """Return which of these items have any of these texts, (num_rows,) bool."""
        wanted = [code for text in texts for code in self.codes_with(text)]
        if len(wanted) <= _FEW_CODES:
            mask = np.zeros(len(self.codes[rows]), dtype=bool)
            for code in wanted:
                mask |= self.codes[rows] == code
            return mask
        has_any = np.zeros(len(self.values) + 1, dtype=bool)
        has_any[wanted] = True
        return has_any.take(self.codes[rows], mode="clip")  # codes added meanwhile map to the last, which is false

    def set(self, index: int, texts: tuple[str, ...]) -> None:
        """Set the texts of an item."""
        code = self.code(texts)
        if (before := self.codes[index]) != code:
            self.num_set += bool(code) - bool(before)
            self.codes[index] = code
            self.changes.append((self.revision + 1, index))
            self.revision += 1

    def set_all(self, rows: np.ndarray, codes: np.ndarray) -> None:
        """Set the codes of distinct items at once."""
        before = self.codes[rows]
        self.num_set += int(np.count_nonzero(codes)) - int(np.count_nonzero(before))
        self.codes[rows] = codes
        _note_changes(self, rows[before != codes])

    def codes_from(self, other: "TextColumn", rows: np.ndarray) -> np.ndarray:
        """Return the codes, (num_rows,) int32, that this column has for another column's texts of these items."""
        codes: np.ndarray = other.codes[rows]
        if other.values is self.values:
            return codes
        used, at = np.unique(codes, return_inverse=True)
        own: np.ndarray = np.array([self.code(other.values[code]) for code in used.tolist()], dtype=np.int32)
        return own[at]

    def code(self, texts: tuple[str, ...]) -> int:
        """Return the code of these texts in `values`; new texts are added."""
        code = self.code_of.get(texts)
        if code is None:
            code = len(self.values)
            self.values.append(texts)
            self.code_of[texts] = code
        return code

    def all_codes(self, values: Sequence[tuple[str, ...]]) -> np.ndarray:
        """Return the codes (n,) int32 of many texts at once; see `code`."""
        for texts in set(values) - self.code_of.keys():
            self.code(texts)
        return np.fromiter(map(self.code_of.__getitem__, values), dtype=np.int32, count=len(values))

    def count(self) -> None:
        """Count the items that have texts, after cells were written directly."""
        self.num_set = int(np.count_nonzero(self.codes))
        self.max_values = max(self.max_values, 2 * len(self.values))

    def compacted(self) -> "TextColumn":
        """Return a copy with only the used `values`. It may grow to twice as many before it is due again."""
        used = np.union1d(self.codes, [0])
        values = [self.values[code] for code in used.tolist()]
        code_of = {texts: code for code, texts in enumerate(values)}
        codes = np.searchsorted(used, self.codes).astype(np.int32)
        max_values = max(_MIN_VALUES, 2 * len(values))
        return TextColumn(codes, values, code_of, self.revision, self.changes, self.num_set, max_values)

    def grown(self, num_items: int) -> "TextColumn":
        """Return a copy for more items, which shares `values`."""
        codes = _grown(self.codes, num_items, 0)
        own = self.revision, self.changes, self.num_set, self.max_values
        return TextColumn(codes, self.values, self.code_of, *own)


@dataclass(slots=True)
class NumberColumn:
    """Numbers, (num_items,) float64, NaN for items without a number."""

    numbers: np.ndarray
    revision: int = 0
    changes: deque[tuple[int, int]] = field(default_factory=_changes)
    num_set: int = 0

    def set(self, index: int, number: float) -> None:
        """Set the number of an item, NaN for none."""
        before = self.numbers[index]
        if before != number and not (number != number and before != before):
            self.num_set += int(before != before) - int(number != number)
            self.numbers[index] = number
            self.changes.append((self.revision + 1, index))
            self.revision += 1

    def set_all(self, rows: np.ndarray, numbers: np.ndarray) -> None:
        """Set the numbers of distinct items at once."""
        before = self.numbers[rows]
        was_set, is_set = ~np.isnan(before), ~np.isnan(numbers)
        self.num_set += int(is_set.sum()) - int(was_set.sum())
        self.numbers[rows] = numbers
        _note_changes(self, rows[(before != numbers) & (was_set | is_set)])

    def count(self) -> None:
        """Count the items that have a number, after cells were written directly."""
        self.num_set = int(np.count_nonzero(~np.isnan(self.numbers)))

    def grown(self, num_items: int) -> "NumberColumn":
        return replace(self, numbers=_grown(self.numbers, num_items, np.nan))


@dataclass(slots=True)
class FlagColumn:
    """Flags, (num_items,) int8: 1, 0, or -1 for items without a flag."""

    flags: np.ndarray
    revision: int = 0
    changes: deque[tuple[int, int]] = field(default_factory=_changes)
    num_set: int = 0

    def set(self, index: int, flag: bool | None) -> None:
        """Set the flag of an item, None for none."""
        cell = -1 if flag is None else int(flag)
        if (before := self.flags[index]) != cell:
            self.num_set += int(before < 0) - int(cell < 0)
            self.flags[index] = cell
            self.changes.append((self.revision + 1, index))
            self.revision += 1

    def set_all(self, rows: np.ndarray, flags: np.ndarray) -> None:
        """Set the flags of distinct items at once, as cells."""
        before = self.flags[rows]
        self.num_set += int((flags >= 0).sum()) - int((before >= 0).sum())
        self.flags[rows] = flags
        _note_changes(self, rows[before != flags])

    def count(self) -> None:
        """Count the items that have a flag, after cells were written directly."""
        self.num_set = int(np.count_nonzero(self.flags >= 0))

    def grown(self, num_items: int) -> "FlagColumn":
        return replace(self, flags=_grown(self.flags, num_items, -1))


@dataclass(slots=True)
class ItemColumns:
    """The columns of all items that can be shown: the bundle's items by index, then new items, then unused slots.

    The caller defines names of attributes. Built-in names: `categories` (text), `value`, `published_ms`, `expires_ms`,
    `popularity` (numbers; a column exists once an item has such a value). `available` (num_items,) bool tells which
    items may be shown now, by their state and their times; an unused slot is not available.
    """

    num_items: int
    available: np.ndarray
    texts: dict[str, TextColumn] = field(default_factory=dict)
    numbers: dict[str, NumberColumn] = field(default_factory=dict)
    flags: dict[str, FlagColumn] = field(default_factory=dict)

    def kinds(self, name: str) -> tuple[Kind, ...]:
        """Return the kinds of value that items have under this name; may be empty."""
        named = (("text", self.texts), ("number", self.numbers), ("flag", self.flags))
        return tuple(kind for kind, columns in named if name in columns)  # type: ignore[misc]

    def text(self, name: str) -> TextColumn:
        """Return the text column of this name.

        A missing column is added in a new table: readers keep the table that they have.
        """
        if name not in self.texts:
            self.texts = {**self.texts, name: TextColumn(np.zeros(self.num_items, dtype=np.int32))}
        return self.texts[name]

    def number(self, name: str) -> NumberColumn:
        """Return the number column of this name; see `text`."""
        if name not in self.numbers:
            self.numbers = {**self.numbers, name: NumberColumn(np.full(self.num_items, np.nan))}
        return self.numbers[name]

    def flag(self, name: str) -> FlagColumn:
        """Return the flag column of this name; see `text`."""
        if name not in self.flags:
            self.flags = {**self.flags, name: FlagColumn(np.full(self.num_items, -1, dtype=np.int8))}
        return self.flags[name]

    def grown(self, num_items: int) -> "ItemColumns":
        """Return a copy for more items, which have no values and are not available."""
        return ItemColumns(
            num_items,
            _grown(self.available, num_items, False),
            {name: column.grown(num_items) for name, column in self.texts.items()},
            {name: column.grown(num_items) for name, column in self.numbers.items()},
            {name: column.grown(num_items) for name, column in self.flags.items()},
        )


def _note_changes(column: TextColumn | NumberColumn | FlagColumn, rows: np.ndarray) -> None:
    for index in rows.tolist():
        column.changes.append((column.revision + 1, index))
        column.revision += 1


def _grown(cells: np.ndarray, num_items: int, fill: float) -> np.ndarray:
    grown = np.full(num_items, fill, dtype=cells.dtype)
    grown[: len(cells)] = cells
    return grown
