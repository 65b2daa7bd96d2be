"""The snapshot: what is stated of all items, in one Parquet file with the topic's positions that it holds. Replaced as a whole.

    item_id  status  title  text:NAME (JSON lists, by dictionary)  number:NAME  flag:NAME

A file that is missing or damaged (its pages have checksums) is as none: the topic has it all.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import structlog

from models.files import rename_durably
from services.items.layout import HAS_CATEGORIES, ItemLayout
from services.items.live_items import LiveItems

log = structlog.get_logger()

_TEXT, _NUMBER, _FLAG = "text:", "number:", "flag:"


@dataclass(frozen=True, slots=True)
class Positions:
    """How far a topic was read: the next offset of each partition, and the topic's id, which changes when it is made again."""

    topic_id: str
    offsets: Mapping[int, int]


def write_snapshot(path: Path, items: LiveItems, positions: Positions) -> None:
    """Write what is stated of all items. Raises OSError."""
    table = items.read(_table_of)
    about = {"topic_id": positions.topic_id, "offsets": json.dumps({str(k): v for k, v in positions.offsets.items()})}
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    pq.write_table(table.replace_schema_metadata(about), scratch, write_page_checksum=True)
    rename_durably(scratch, path)


def read_snapshot(path: Path, items: LiveItems) -> Positions | None:
    """Take over what was written, and return its positions; None where there is no snapshot that can be read."""
    if not path.exists():
        return None
    try:
        names = pq.read_schema(path).names
        texts = [name for name in names if name.startswith(_TEXT)]
        table = pq.read_table(path, read_dictionary=texts, page_checksum_verification=True)
        about = table.schema.metadata or {}
        offsets = {int(k): int(v) for k, v in json.loads(about[b"offsets"]).items()}
        positions = Positions(about[b"topic_id"].decode(), offsets)
        table["item_id"], table["status"], table["title"]
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        log.warning("items_snapshot_unreadable", path=str(path), error=repr(error))
        return None
    items.fill(lambda layout: _fill(layout, table))
    return positions


def _table_of(layout: ItemLayout) -> pa.Table:
    indices = np.flatnonzero(layout.status)
    columns: dict[str, pa.Array] = {
        "item_id": pa.array([item_id for _, item_id in layout.stated()], pa.string()),
        "status": pa.array(layout.status[indices]),
        "title": pa.array([layout.stated_titles.get(index) for index in indices.tolist()], pa.string()),
    }
    for name, texts in layout.columns.texts.items():
        codes = texts.codes[indices]
        if name == "categories":
            codes = np.where(layout.status[indices] & HAS_CATEGORIES, codes, 0)
        used, places = np.unique(codes, return_inverse=True)
        words = pa.array([json.dumps(texts.values[code], ensure_ascii=False) for code in used.tolist()], pa.string())
        columns[_TEXT + name] = pa.DictionaryArray.from_arrays(pa.array(places.astype(np.int32)), words)
    for name, numbers in layout.columns.numbers.items():
        if name != "popularity":
            columns[_NUMBER + name] = pa.array(numbers.numbers[indices])
    for name, flags in layout.columns.flags.items():
        columns[_FLAG + name] = pa.array(flags.flags[indices])
    return pa.table(columns)


def _fill(layout: ItemLayout, table: pa.Table) -> None:
    """Write a snapshot's states into a layout of which little or nothing is stated yet."""
    item_ids, titles = table["item_id"].to_pylist(), table["title"]
    places = layout.places(item_ids)
    status = table["status"].to_numpy()
    layout.status[places] = status
    if titles.null_count < len(titles):
        stated = zip(places.tolist(), titles.to_pylist(), strict=True)
        layout.stated_titles.update({place: title for place, title in stated if title is not None})
    for name in table.column_names:
        kind, _, own = name.partition(":")
        match f"{kind}:":
            case "text:":
                column = layout.columns.text(own)
                codes = _codes(table[name], column.code)
                has_own = (status & HAS_CATEGORIES) > 0 if own == "categories" else slice(None)
                column.codes[places[has_own]] = codes[has_own]
                column.revision += 1
            case "number:":
                layout.columns.number(own).numbers[places] = table[name].to_numpy()
                layout.columns.number(own).revision += 1
            case "flag:":
                layout.columns.flag(own).flags[places] = table[name].to_numpy()
                layout.columns.flag(own).revision += 1


def _codes(column: pa.ChunkedArray, code: Callable[[tuple[str, ...]], int]) -> np.ndarray:
    """Return the codes (n,) int32 of a column of JSON lists, by the column's table of texts."""
    whole = column.unify_dictionaries().combine_chunks()
    whole = whole if isinstance(whole, pa.DictionaryArray) else whole.chunk(0)
    own = np.array([code(tuple(json.loads(words))) for words in whole.dictionary.to_pylist()], dtype=np.int32)
    return own[whole.indices.to_numpy()] if len(own) else np.zeros(len(whole), dtype=np.int32)
