"""The options that name the columns of a table, shared by all commands."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

from pipelines.declaration import Option, options_of
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnArguments:
    """The options of a command line that name a table's columns."""

    column: Annotated[
        tuple[str, ...],
        Option("NAME=OUR_NAME: the table's column NAME is our field OUR_NAME, such as sku=item_id; repeat it."),
    ] = ()
    skip: Annotated[tuple[str, ...], Option("A column that is not read; repeat it.")] = ()
    header: Annotated[
        tuple[str, ...],
        Option("Column names where the first line is data: events=user_id,item_id,event_time; _ skips a column."),
    ] = ()

    def parsed(self, kind: str = "") -> TableOptions:
        """Return the table options. `kind` applies to headers without a kind. Raises ConfigError."""
        return TableOptions(
            names=dict(_pair("--column", text, "sku=item_id") for text in self.column),
            skipped=frozenset(self.skip),
            headers=dict(_header(text, kind) for text in self.header),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TableArguments(ColumnArguments):
    """The options of a command line that say how tables of events and items are read."""

    lists: Annotated[
        tuple[str, ...],
        Option("COLUMN=SIGN: the separator of a list's values, such as 'categories=,'; repeat it.", names=("--list",)),
    ] = ()

    def parsed(self, kind: str = "") -> TableOptions:
        """Return the table options. `kind` applies to headers without a kind. Raises ConfigError."""
        splits = dict(_pair("--list", text, "categories=;") for text in self.lists)
        return replace(ColumnArguments.parsed(self, kind), splits=splits)

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(
            word
            for declared in options_of(type(self))
            for value in getattr(self, declared.field.name)
            for word in (*declared.names, value)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemArguments(TableArguments):
    """The options of a command line for items whose attributes are text."""

    number: Annotated[tuple[str, ...], Option("An attribute that text states as a number; repeat it.")] = ()
    flag: Annotated[tuple[str, ...], Option("An attribute that text states as true or false; repeat it.")] = ()

    def parsed(self, kind: str = "") -> TableOptions:
        """Return the table options. `kind` applies to headers without a kind. Raises ConfigError."""
        options = TableArguments.parsed(self, kind)
        return replace(options, numbers=frozenset(self.number), flags=frozenset(self.flag))


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
