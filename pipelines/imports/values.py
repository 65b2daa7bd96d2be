"""What one row of a shop's table states: an item of the live catalogue, or an event. A value that cannot be read is named by its column. Pure.

Columns go by the names of the fields (`services.contracts.items`, `services.contracts.events`), or by what `Columns` maps to them. Of items every other column is an
attribute: text, unless the source has a type for it or it is listed as a number or a flag. Blanks around a value, and empty values, mean nothing. A time is ISO 8601 (UTC where it
has no zone), Unix seconds or Unix milliseconds.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

from pipelines.imports.sources import Row
from services.contracts.events import Interaction, interaction_from
from services.contracts.items import ItemState, item_from
from services.errors import ConfigError, DataError, InvalidRequest

ITEM_FIELDS = ("item_id", "title", "categories", "available", "published_ms", "expires_ms", "value", "text")
EVENT_FIELDS = ("user_id", "item_id", "event_time", "event_type", "value", "event_id")
_NEEDED = {
    "items": {"item_id": "'i42'"},
    "events": {"user_id": "'u17'", "item_id": "'i42'", "event_time": "'2026-11-21T12:00:00Z'"},
}
_FLAGS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_LAST_UNIX_SECOND = 1e11
"""Numbers below this are Unix seconds, from it on Unix milliseconds, as in tables of the pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Which column of the source each field has, where the names differ, and which attributes of a CSV file are numbers or flags."""

    names: Mapping[str, str] = field(default_factory=dict)
    numbers: frozenset[str] = frozenset()
    flags: frozenset[str] = frozenset()

    def of(self, name: str) -> str:
        """Return the column of a field."""
        return self.names.get(name, name)

    def check(self, row: Row, kind: str) -> None:
        """Refuse a table without the columns that are needed or named. Raises DataError or ConfigError."""
        fields = ITEM_FIELDS if kind == "items" else EVENT_FIELDS
        for name in self.names:
            if name not in fields:
                raise ConfigError(f"--column: {name} is no field of {kind}; the fields are {', '.join(fields)}")
        for name in (*self.names, *_NEEDED[kind], *self.numbers, *self.flags):
            if self.of(name) not in row:
                advice = f"; --column {name}=COLUMN names another" if name in fields else ""
                raise DataError(
                    self.of(name), f"missing among {', '.join(row)}{advice}", _NEEDED[kind].get(name, "17.5")
                )


def item_of(row: Row, columns: Columns) -> ItemState:
    """Return the state of an item. Raises InvalidRequest naming the column."""
    named = {columns.of(name): name for name in ITEM_FIELDS}
    fields: dict[str, Any] = {}
    attributes: dict[str, Any] = {}
    for column, raw in row.items():
        value = _plain(raw)
        if value is None:
            continue
        match named.get(column):
            case None:
                attributes[column] = _attribute(column, value, columns)
            case "item_id" | "title" as name:
                fields[name] = _text(column, value)
            case "categories":
                parts = value if isinstance(value, list) else str(value).split("|")
                fields["categories"] = [part for part in (str(one).strip() for one in parts) if part]
            case "available":
                fields["available"] = _flag(column, value)
            case "published_ms" | "expires_ms" as name:
                fields[name] = time_ms(column, value)
            case "value":
                fields["value"] = _number(column, value)
            case _:
                pass  # `text` is for the pipeline's table of items: what is learned from, not shown
    if attributes:
        fields["attributes"] = attributes
    item_id = fields.pop("item_id", "")
    try:
        return item_from(item_id, fields)
    except InvalidRequest as error:
        top, _, rest = error.field.partition(".")
        raise InvalidRequest(
            rest if top == "attributes" and rest else columns.of(top), error.problem, error.fix
        ) from error


def catalogue_row(row: Row, columns: Columns) -> dict[str, str | None]:
    """Return what a bundle's catalogue has of an item, as text by the names of the pipeline's table of items."""
    found: dict[str, str | None] = {}
    for name in ("item_id", "title", "categories", "text"):
        value = _plain(row.get(columns.of(name)))
        parts = "|".join(map(str, value)) if isinstance(value, list) else value
        found[name] = None if parts is None else str(parts)
    return found


def event_of(row: Row, columns: Columns) -> Interaction:
    """Return the event of a row. Without an id it gets one of its content, so that it counts once however often it is imported. Raises InvalidRequest naming the column."""
    given = {name: _plain(row.get(columns.of(name))) for name in EVENT_FIELDS}
    for name in _NEEDED["events"]:
        if given[name] is None:
            raise InvalidRequest(columns.of(name), "missing", f"give a value such as {_NEEDED['events'][name]}")
    fields: dict[str, Any] = {
        name: _text(columns.of(name), given[name])
        for name in ("user_id", "item_id", "event_type", "event_id")
        if given[name] is not None
    }
    fields["event_time_ms"] = time_ms(columns.of("event_time"), given["event_time"])
    if given["value"] is not None:
        fields["value"] = _number(columns.of("value"), given["value"])
    if "event_id" not in fields:
        content = json.dumps(fields, sort_keys=True, ensure_ascii=False).encode()
        fields["event_id"] = f"import-{hashlib.sha256(content).hexdigest()[:32]}"
    try:
        return interaction_from(fields)
    except InvalidRequest as error:
        name = "event_time" if error.field == "event_time_ms" else error.field
        raise InvalidRequest(columns.of(name), error.problem, error.fix) from error


def time_ms(column: str, value: Any) -> int:
    """Return a time in any of its forms as Unix milliseconds. Raises InvalidRequest naming the column."""
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime.combine(value, time())
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            try:
                value = datetime.fromisoformat(value)
            except ValueError as error:
                raise _no_time(column, value) from error
    if isinstance(value, datetime):
        aware = value if value.tzinfo else value.replace(tzinfo=UTC)
        return round(aware.timestamp() * 1_000)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise _no_time(column, value)
    return round(value * 1_000 if value < _LAST_UNIX_SECOND else value)


def _no_time(column: str, value: Any) -> InvalidRequest:
    return InvalidRequest(column, f"{value!r:.60} is no time", "give ISO 8601, Unix seconds or Unix milliseconds")


def _plain(value: Any) -> Any:
    """Return a value without blanks around it; None for what means nothing."""
    if isinstance(value, str):
        return value.strip() or None
    if isinstance(value, Decimal):
        value = float(value)
    if isinstance(value, float) and math.isnan(value):
        return None
    return value


def _text(column: str, value: Any) -> str:
    if isinstance(value, float | bool | list | dict | bytes):
        raise InvalidRequest(column, f"{value!r:.60} is no text", "give text, or an integer")
    return str(value)


def _flag(column: str, value: Any) -> bool:
    found = value if isinstance(value, bool) else _FLAGS.get(str(value).casefold())
    if found is None:
        raise InvalidRequest(column, f"{value!r:.60} is no flag", "give true or false")
    return found


def _number(column: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(column, f"{value!r:.60} is no number", "give a number such as 17.5") from error


def _attribute(column: str, value: Any, columns: Columns) -> Any:
    if column in columns.numbers:
        return _number(column, value)
    if column in columns.flags:
        return _flag(column, value)
    return value.isoformat() if isinstance(value, date) else value
