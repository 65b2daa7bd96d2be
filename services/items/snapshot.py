"""The snapshot: what is stated of all items, in one Parquet file with the topic's positions that it holds. Replaced as a whole.

    item_id  status  title  text:NAME (JSON lists, by dictionary)  number:NAME  flag:NAME

A file that is missing or damaged (its pages have checksums) is as none: the topic has it all.
"""

import json
import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import structlog

from models.files import rename_durably
from services.items.columns import TextColumn
from services.items.layout import HAS_CATEGORIES, ItemLayout
from services.items.live_items import LiveItems

log = structlog.get_logger()

_ROWS = 65_536
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
    pq.write_table(table.replace_schema_metadata(about), scratch, row_group_size=_ROWS, write_page_checksum=True)
    rename_durably(scratch, path)


def read_snapshot(path: Path, items: LiveItems) -> Positions | None:
    """Take over what was written, and return its positions; None where there is no snapshot that can be read to its end."""
    if not path.exists():
        return None
    try:
        texts = [name for name in pq.read_schema(path).names if name.startswith(_TEXT)]
        with pq.ParquetFile(path, read_dictionary=texts, page_checksum_verification=True) as file:
            about = file.schema_arrow.metadata or {}
            offsets = {int(k): int(v) for k, v in json.loads(about[b"offsets"]).items()}
            positions = Positions(about[b"topic_id"].decode(), offsets)
            items.fill(lambda layout: _fill(layout, file))
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        log.warning("items_snapshot_unreadable", path=str(path), error=repr(error))
        return None
    finally:
        pa.default_memory_pool().release_unused()
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


def _fill(layout: ItemLayout, file: pq.ParquetFile) -> None:
    """Write a snapshot's states into a layout of which little or nothing is stated yet, part after part: so it takes no more memory than it needs."""
    known: Mapping[str, dict[str, int]] = defaultdict(dict)
    for part in file.iter_batches(_ROWS, use_threads=False):
        _fill_part(layout, part, known)


def _fill_part(layout: ItemLayout, part: pa.RecordBatch, known: Mapping[str, dict[str, int]]) -> None:
    titles, status = part["title"], part["status"].to_numpy()
    places = layout.places(part["item_id"].to_pylist())
    layout.status[places] = status
    if titles.null_count < len(titles):
        stated = zip(places.tolist(), titles.to_pylist(), strict=True)
        layout.stated_titles.update({place: title for place, title in stated if title is not None})
    for name in part.schema.names:
        kind, _, own = name.partition(":")
        match f"{kind}:":
            case "text:":
                column = layout.columns.text(own)
                codes = _codes(part[name], column, known[own])
                has_own = (status & HAS_CATEGORIES) > 0 if own == "categories" else slice(None)
                column.codes[places[has_own]] = codes[has_own]
                column.revision += 1
            case "number:":
                layout.columns.number(own).numbers[places] = part[name].to_numpy()
                layout.columns.number(own).revision += 1
            case "flag:":
                layout.columns.flag(own).flags[places] = part[name].to_numpy()
                layout.columns.flag(own).revision += 1
    layout.words_revision += 1


def _codes(cells: pa.DictionaryArray, column: TextColumn, known: dict[str, int]) -> np.ndarray:
    """Return the codes (n,) int32 of JSON lists, by the column's table of texts. `known` are those of the parts before: each part has all words."""
    words = cells.dictionary.to_pylist()
    for word in words:
        if word not in known:
            known[word] = column.code(tuple(json.loads(word)))
    codes: np.ndarray = np.array([known[word] for word in words], dtype=np.int32)[cells.indices.to_numpy()]
    return codes
