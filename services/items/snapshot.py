"""The snapshot: the states of all items, in one Parquet file with the topic's positions. Replaced as a whole.

    item_id  status  title  text:NAME (JSON lists, by dictionary)  number:NAME  flag:NAME

The file ends with a digest of the rest. A tenant's states are in a file of their own, `NAME.TENANT`, written before it:
its states may be newer than the positions, which is harmless. If one of the files is missing or damaged, all are
ignored, and the topic must have all states: the file `whole_topic` has the id of a topic that does, which it lacks once
a topic was recreated.
"""

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from models.files import write_durably
from services.contracts.tenant import check_tenant
from services.errors import EnvironmentFault
from services.items.columns import TextColumn
from services.items.layout import HAS_CATEGORIES, ItemLayout
from services.items.live_items import LiveItems
from services.settings.topic_reader import Mark, mark_from

_WHOLE = "whole_topic"
_DIGEST_BYTES = 32
_ROWS = 65_536
_TEXT, _NUMBER, _FLAG = "text:", "number:", "flag:"


@dataclass(frozen=True, slots=True)
class Positions:
    """How far a topic was read, by partition, and the topic's id, which changes when it is recreated."""

    topic_id: str
    marks: Mapping[int, Mark]


def write_snapshot(path: Path, items: LiveItems, positions: Positions, whole_topic: str = "") -> None:
    """Write the states of all items, of every tenant, and the id of a topic that has all of them. Raises OSError."""
    tenants = items.tenants
    for tenant, own in tenants.items():
        _write(_path_of(path, tenant), own, {})
    marks = json.dumps({str(number): asdict(mark) for number, mark in positions.marks.items()})
    about = {"topic_id": positions.topic_id, "marks": marks, "tenants": json.dumps(sorted(tenants))}
    _write(path, items, about)
    for stale in _tenant_files(path):  # which no written file names
        if stale.name.removeprefix(f"{path.name}.") not in tenants:
            stale.unlink(missing_ok=True)
    write_durably(path.with_name(_WHOLE), whole_topic.encode())


def read_whole_topic(path: Path) -> str:
    """Return the id of the topic that has all states of the snapshot at this path; empty if no topic is known to."""
    try:
        return path.with_name(_WHOLE).read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _write(path: Path, items: LiveItems, about: Mapping[str, str]) -> None:
    table = items.read(_table_of).replace_schema_metadata(dict(about))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=_ROWS)
    data = sink.getvalue()
    write_durably(path, b"".join((data, _digest(data))))


def read_snapshot(path: Path, items: LiveItems) -> Positions | None:
    """Load the written states and return their positions; None without a snapshot.

    Raises EnvironmentFault for a damaged file; states of other files may be loaded then.
    """
    if not path.exists():
        return None
    file = path
    try:
        about = _read(file, items)
        marks = {int(number): mark_from(plain) for number, plain in json.loads(about[b"marks"]).items()}
        positions = Positions(about[b"topic_id"].decode(), marks)
        for tenant in json.loads(about.get(b"tenants", b"[]")):
            file = _path_of(path, check_tenant(tenant))
            _read(file, items.of(tenant))
    except (OSError, KeyError, TypeError, ValueError, pa.ArrowException) as error:
        raise _damaged(file, path) from error
    finally:
        pa.default_memory_pool().release_unused()
    return positions


def check_snapshot(path: Path) -> None:
    """Raise EnvironmentFault for a damaged file. Reads no states."""
    for file in (path, *_tenant_files(path)) if path.exists() else ():
        try:
            _whole(file)
        except OSError as error:
            raise _damaged(file, path) from error


def _damaged(file: Path, path: Path) -> EnvironmentFault:
    return EnvironmentFault(f"{file}: damaged snapshot of items; restore it, or remove {path} to begin without items")


def _read(path: Path, items: LiveItems) -> Mapping[bytes, bytes]:
    """Load one file's states, and return its metadata. Raises OSError, or an error of its content."""
    data = _whole(path)
    texts = [name for name in pq.read_schema(pa.BufferReader(data)).names if name.startswith(_TEXT)]
    with pq.ParquetFile(pa.BufferReader(data), read_dictionary=texts) as file:
        about: Mapping[bytes, bytes] = file.schema_arrow.metadata or {}
        items.fill(lambda layout: _fill(layout, file))
    return about


def _path_of(path: Path, tenant: str) -> Path:
    return path.with_name(f"{path.name}.{tenant}")


def _tenant_files(path: Path) -> list[Path]:
    return [*path.parent.glob(f"{path.name}.*")]


def _whole(path: Path) -> pa.Buffer:
    """Return the Parquet part of the file. Raises OSError, also for a wrong digest."""
    with pa.OSFile(str(path)) as file:
        data = file.read_buffer()
    end = data.size - _DIGEST_BYTES
    if end < 0 or _digest(data[:end]) != data[end:].to_pybytes():
        raise OSError(f"{path}: content differs from its digest")
    return data[:end]


def _digest(data: pa.Buffer) -> bytes:
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()


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
    """Write a snapshot's states into a layout with few or no states, part by part to bound memory."""
    known: Mapping[str, dict[str, int]] = defaultdict(dict)
    for part in file.iter_batches(_ROWS, use_threads=False):
        _fill_part(layout, part, known)
    layout.count()


def _fill_part(layout: ItemLayout, part: pa.RecordBatch, known: Mapping[str, dict[str, int]]) -> None:
    titles, status = part["title"], part["status"].to_numpy()
    places = layout.places(part["item_id"].to_pylist())
    layout.status[places] = status
    if titles.null_count < len(titles):
        stated = zip(places.tolist(), titles.to_pylist(), strict=True)
        layout.stated_titles.update({index: title for index, title in stated if title is not None})
    for name in part.schema.names:
        kind, _, own = name.partition(":")
        match f"{kind}:":
            case "text:" if layout.has_room(own, "texts"):
                column = layout.columns.text(own)
                codes = _codes(part[name], column, known[own])
                has_own = (status & HAS_CATEGORIES) > 0 if own == "categories" else slice(None)
                column.codes[places[has_own]] = codes[has_own]
                column.revision += 1
            case "number:" if layout.has_room(own, "numbers"):
                layout.columns.number(own).numbers[places] = part[name].to_numpy()
                layout.columns.number(own).revision += 1
            case "flag:" if layout.has_room(own, "flags"):
                layout.columns.flag(own).flags[places] = part[name].to_numpy()
                layout.columns.flag(own).revision += 1
    layout.words_revision += 1
    layout.reworded_revision += 1


def _codes(cells: pa.DictionaryArray, column: TextColumn, known: dict[str, int]) -> np.ndarray:
    """Return the codes (n,) int32 of JSON lists, by the column's table of texts.

    `known` has the codes of earlier parts: each part's dictionary has all words.
    """
    words = cells.dictionary.to_pylist()
    for word in words:
        if word not in known:
            known[word] = column.code(tuple(json.loads(word)))
    codes: np.ndarray = np.array([known[word] for word in words], dtype=np.int32)[cells.indices.to_numpy()]
    return codes
