"""The options that name the columns of a table, shared by all commands."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.errors import ConfigError

UNNAMED = "_"
"""In `--header`: a column that is skipped."""
_KINDS = ("events", "items")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableOptions:
    """The names of columns, and how to read some of them.

    Args:
        names: Our name by the table's name.
        skipped: Columns that are not read.
        headers: The names of all columns in order, by kind of table, if the first line is data.
        splits: The separator of lists written as text, by column.
        numbers: Attributes that text states as numbers.
        flags: Attributes that text states as true or false.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    skipped: frozenset[str] = frozenset()
    headers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    splits: Mapping[str, str] = field(default_factory=dict)
    numbers: frozenset[str] = frozenset()
    flags: frozenset[str] = frozenset()


PLAIN = TableOptions()
"""Options of a table whose header names the columns."""


def table_options(
    column: Sequence[str] | None = None,
    skip: Sequence[str] | None = None,
    header: Sequence[str] | None = None,
    split: Sequence[str] | None = None,
    number: Sequence[str] | None = None,
    flag: Sequence[str] | None = None,
    kind: str = "",
) -> TableOptions:
    """Return the options of a command line. `kind` applies to headers without a kind. Raises ConfigError."""
    return TableOptions(
        names=dict(_pair("--column", text, "sku=item_id") for text in column or ()),
        skipped=frozenset(skip or ()),
        headers=dict(_header(text, kind) for text in header or ()),
        splits=dict(_pair("--list", text, "categories=;") for text in split or ()),
        numbers=frozenset(number or ()),
        flags=frozenset(flag or ()),
    )


def _pair(option: str, text: str, example: str) -> tuple[str, str]:
    left, separator, right = text.rpartition("=")
    if not (separator and left and right):
        raise ConfigError(f"{option}: {text!r} is not NAME=VALUE; give for example {option} {example}")
    return left, right


def _header(text: str, kind: str) -> tuple[str, tuple[str, ...]]:
    before, separator, names = text.partition("=")
    kind, names = (before, names) if separator else (kind, text)
    columns = tuple(name.strip() or UNNAMED for name in names.split(","))
    if kind not in _KINDS or not names.strip():
        example = "--header events=user_id,item_id,event_time"
        raise ConfigError(f"--header: {text!r} names no columns; give for example {example}")
    named = [name for name in columns if name != UNNAMED]
    if len(set(named)) < len(named):
        raise ConfigError(f"--header: {text!r} repeats a name; give each column its own, or {UNNAMED} to skip it")
    return kind, columns
