"""The attributes of items in columns, one value an item, by item index. Numpy only.

An attribute holds texts, numbers or flags, and one of a name may hold all three kinds, in a column each. A change of an item changes its
cell in place and the column's revision, so that what was computed from a column can be kept until that moves.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Kind = Literal["text", "number", "flag"]

_NUM_CHANGES_KEPT = 1_024


def _changes() -> deque[int]:
    """The items of a column's newest changes, one for each revision: what was computed from it can be mended there alone."""
    return deque(maxlen=_NUM_CHANGES_KEPT)


@dataclass(slots=True)
class TextColumn:
    """Texts: item i has those of `values[codes[i]]`. `codes` is (num_items,) int32; `values[0]` is empty, for items that have none.

    Items with the same texts share an entry of `values`, which only grows.
    """

    codes: np.ndarray
    values: list[tuple[str, ...]] = field(default_factory=lambda: [()])
    code_of: dict[tuple[str, ...], int] = field(default_factory=lambda: {(): 0})
    revision: int = 0
    changes: deque[int] = field(default_factory=_changes)

    def set(self, index: int, texts: tuple[str, ...]) -> None:
        """Give an item these texts."""
        code = self.code_of.setdefault(texts, len(self.values))
        if code == len(self.values):
            self.values.append(texts)
        self.codes[index] = code
        self.changes.append(index)
        self.revision += 1


@dataclass(slots=True)
class NumberColumn:
    """Numbers, (num_items,) float64, NaN for items that have none."""

    numbers: np.ndarray
    revision: int = 0
    changes: deque[int] = field(default_factory=_changes)

    def set(self, index: int, number: float) -> None:
        """Give an item this number, NaN for none."""
        self.numbers[index] = number
        self.changes.append(index)
        self.revision += 1


@dataclass(slots=True)
class FlagColumn:
    """Flags, (num_items,) int8: 1, 0, or -1 for items that have none."""

    flags: np.ndarray
    revision: int = 0
    changes: deque[int] = field(default_factory=_changes)

    def set(self, index: int, flag: bool | None) -> None:
        """Give an item this flag, None for none."""
        self.flags[index] = -1 if flag is None else int(flag)
        self.changes.append(index)
        self.revision += 1


@dataclass(slots=True)
class ItemColumns:
    """The columns of all items that can be shown: those of the bundle by their index, then new ones.

    Names of attributes are the caller's. Beside them: `categories` (text), `title` (text), `value`, `published_ms`, `expires_ms`,
    `popularity` (numbers). `available` (num_items,) bool says which items may be shown now, by their state and their times.
    """

    num_items: int
    available: np.ndarray
    texts: dict[str, TextColumn] = field(default_factory=dict)
    numbers: dict[str, NumberColumn] = field(default_factory=dict)
    flags: dict[str, FlagColumn] = field(default_factory=dict)

    def kinds(self, name: str) -> tuple[Kind, ...]:
        """Return the kinds of value that items have under this name; empty where none has it."""
        named = (("text", self.texts), ("number", self.numbers), ("flag", self.flags))
        return tuple(kind for kind, columns in named if name in columns)  # type: ignore[misc]
