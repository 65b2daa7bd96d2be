"""A folder of sequences as event and item tables for the pipeline.

    sequences.txt          a line for each user, `user item item ...`, in time order
    items.jsonl            a line for each item, `{"item_id": 1, "title": "Lamp", "brand": "Acme", ...}`; or
    item_attributes.json   `{"1": [3, 17]}`, the attribute numbers of each item, whose title is then "item 1"

`categories` go to the column of that name; all other keys except id and title go to `text`, from which item embeddings
are made. A number becomes a word prefixed by its key: `"year": 1999` is `year1999`, attribute 17 is `a17`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

from services.errors import ConfigError

_SEQUENCES, _ITEMS, _ATTRIBUTES = "sequences.txt", "items.jsonl", "item_attributes.json"
_FIRST_EVENT_S = 1_400_000_000
_EXAMPLE = '{"item_id": 1, "title": "Lamp", "brand": "Acme", "categories": ["light"]}'
_ATTRIBUTES_EXAMPLE = '{"1": [3, 17]}'
_OWN_COLUMNS: dict[str, pl.DataType] = {
    "item_id": pl.String(),
    "title": pl.String(),
    "categories": pl.List(pl.String()),
}
_COLUMNS = _OWN_COLUMNS | {"text": pl.String()}


def as_tables(source: Path, out: Path) -> tuple[Path, Path]:
    """Write the folder as tables of events and items, and return their paths. Raises ConfigError.

    The n-th event of a user is n seconds old.
    """
    out.mkdir(parents=True, exist_ok=True)
    name = source.resolve().name
    events, items = out / f"{name}.parquet", out / f"{name}_items.parquet"
    rows = [
        (user, item, _FIRST_EVENT_S + index)
        for user, sequence in read_sequences(source)
        for index, item in enumerate(sequence)
    ]
    pl.DataFrame(rows, schema=["user_id", "item_id", "event_time"], orient="row").write_parquet(events)
    read_items(source).write_parquet(items)
    return events, items


def read_sequences(source: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield each user with the items, oldest first. Raises ConfigError."""
    path = source / _SEQUENCES
    if not path.is_file():
        raise ConfigError(
            f"--sequences: {source} has no {_SEQUENCES}; put it there, with a line `user item item ...` for each user"
        )
    with path.open() as lines:
        for line in lines:
            if words := line.split():
                yield words[0], words[1:]


def read_items(source: Path) -> pl.DataFrame:
    """Return the items as a raw table (item_id, title, categories, text), in file order. Raises ConfigError."""
    lines, attributes = source / _ITEMS, source / _ATTRIBUTES
    if lines.is_file():
        with lines.open() as opened:
            rows = [
                _row(_parsed(line, f"{lines}, line {number}", _EXAMPLE, "item_id"))
                for number, line in enumerate(opened, 1)
            ]
    elif attributes.is_file():
        items = _parsed(attributes.read_text(), str(attributes), _ATTRIBUTES_EXAMPLE)
        rows = [_row({"item_id": item, "title": f"item {item}", "a": numbers}) for item, numbers in items.items()]
    else:
        raise ConfigError(
            f"--sequences: {source} has neither {_ITEMS} nor {_ATTRIBUTES}; put one of them there: "
            f"{_ITEMS} with a line such as {_EXAMPLE} for each item, or {_ATTRIBUTES} such as {_ATTRIBUTES_EXAMPLE}"
        )
    return pl.DataFrame(rows, schema=_COLUMNS)


def _parsed(text: str, where: str, example: str, *needed: str) -> dict[str, Any]:
    try:
        entry = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--sequences: {where} is not JSON ({error}); give such as {example}") from error
    if not isinstance(entry, dict) or not entry.keys() >= {*needed}:
        raise ConfigError(f"--sequences: {where} is no {' with '.join(('object', *needed))}; give such as {example}")
    return entry


def _row(entry: dict[str, Any]) -> dict[str, Any]:
    categories = entry.get("categories")
    named = categories.split("|") if isinstance(categories, str) else _words("categories", categories)
    text = [word for key, value in entry.items() if key not in _OWN_COLUMNS for word in _words(key, value)]
    title = str(entry.get("title") or "untitled")
    return {"item_id": str(entry["item_id"]), "title": title, "categories": named, "text": " ".join(text) or None}


def _words(key: str, value: Any) -> list[str]:
    """Return a text unchanged, a number after its key, and the values of lists and objects in turn; [] for null."""
    match value:
        case None:
            return []
        case str():
            return [value]
        case list():
            return [word for member in value for word in _words(key, member)]
        case dict():
            return [word for name, member in value.items() for word in _words(name, member)]
    return [f"{key}{value}"]
